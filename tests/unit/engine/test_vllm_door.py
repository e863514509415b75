"""What a pause does to each request before an engine that pauses as a whole; vLLM itself is not needed for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

import pytest

from penstock.engine.vllm_answers import Answer
from penstock.engine.vllm_door import Door
from penstock.errors import RunError
from penstock.ports import OnPause
from penstock.testing import run_virtual


class Core:
    """Makes a token a second for every request while it runs."""

    def __init__(self) -> None:
        self.frozen = self.asleep = False
        self.aborted: set[str] = set()

    async def pause_generation(self, *, mode: Literal["abort", "keep"], clear_cache: bool) -> None:
        assert not clear_cache
        self.frozen = True

    async def resume_generation(self) -> None:
        self.frozen = False

    async def abort(self, request_id: str | list[str]) -> None:
        self.aborted |= {request_id} if isinstance(request_id, str) else set(request_id)

    async def get_weight_version(self) -> str:
        return "0"

    async def sleep(self, level: int) -> None:
        self.asleep = self.frozen = True

    async def wake_up(self) -> None:
        self.asleep = self.frozen = False


class Play:
    def __init__(self, core: Core | None = None) -> None:
        self.core = core or Core()
        self.door = Door(self.core, can_sleep=True, on_change=lambda: None)
        self.made: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[str]] = {}

    async def ask(self, name: str, on_pause: OnPause, tokens: int = 10) -> None:
        self._tasks[name] = asyncio.create_task(self._serve(Answer(name, on_pause), tokens))
        await asyncio.sleep(0)

    async def _serve(self, answer: Answer, tokens: int) -> str:
        name = answer.request_id
        self.made[name] = 0
        async with self.door.passing(answer) as passed:
            if not passed:
                return "sent away"
            while self.made[name] < tokens:
                if name in self.core.aborted:
                    return "aborted"
                await asyncio.sleep(1)
                self.made[name] += not self.core.frozen
        return "done"

    async def outcome(self, name: str) -> str:
        return await self._tasks[name]

    def waits(self, name: str) -> bool:
        return not self._tasks[name].done()


def play(test: Coroutine[Any, Any, None]) -> None:
    run_virtual(test, deadline=1000.0)


def test_a_kept_request_is_frozen_when_the_last_served_one_has_ended() -> None:
    async def test() -> None:
        play = Play()
        await play.ask("kept", "keep", tokens=100)
        await play.ask("served", "serve", tokens=5)
        await play.ask("aborted", "abort")
        await asyncio.sleep(2.5)
        await play.door.pause()
        assert await play.outcome("aborted") == "aborted"
        assert not play.core.frozen, "one is served"
        assert await play.outcome("served") == "done"
        await asyncio.sleep(1)
        assert play.core.frozen
        made = play.made["kept"]
        await asyncio.sleep(100)
        assert play.made["kept"] == made
        await play.ask("judge", "serve", tokens=3)
        assert await play.outcome("judge") == "done"
        await asyncio.sleep(1)
        assert play.core.frozen
        await play.door.resume()
        assert await play.outcome("kept") == "done"

    play(test())


def test_what_is_kept_and_new_waits_at_the_door_and_can_be_sent_away() -> None:
    async def test() -> None:
        play = Play()
        await play.door.pause()
        await play.ask("late", "keep")
        await play.ask("other", "keep")
        await asyncio.sleep(50)
        assert play.made == {"late": 0, "other": 0} and len(play.door.before) == 2
        await play.door.abort(["other", "unknown"])
        assert await play.outcome("other") == "sent away"
        await play.door.resume()
        assert await play.outcome("late") == "done"
        assert not play.door.before and not play.door.inside

    play(test())


def test_what_is_here_finishes_before_sleep_and_what_comes_waits_until_wake() -> None:
    async def test() -> None:
        play = Play()
        with pytest.raises(RunError, match="not paused"):
            await play.door.sleep()
        await play.ask("kept", "keep")
        await play.door.pause()
        await play.ask("waiting", "keep")
        await asyncio.sleep(30)
        await play.door.sleep()
        assert (await play.outcome("kept"), await play.outcome("waiting"), play.core.asleep) == ("done", "done", True)
        await play.ask("late", "serve")
        await asyncio.sleep(30)
        assert play.waits("late")
        await play.door.wake()
        assert not play.core.asleep
        assert await play.outcome("late") == "done"
        await play.door.resume()
        assert not play.core.frozen

    play(test())


def test_waking_one_that_has_not_slept_yet_says_so() -> None:
    async def test() -> None:
        play = Play()
        await play.ask("kept", "keep", tokens=50)
        await play.door.pause()
        sleeping = asyncio.create_task(play.door.sleep())
        await asyncio.sleep(5)
        await play.door.wake()
        assert play.core.frozen, "it is paused, and one is kept"
        await play.door.resume()
        with pytest.raises(RunError, match="woken before it slept"):
            await sleeping

    play(test())


class SlowCore(Core):
    """Obeys a pause at once and says so only after a minute, the first time."""

    slow = True

    async def pause_generation(self, *, mode: Literal["abort", "keep"], clear_cache: bool) -> None:
        await super().pause_generation(mode=mode, clear_cache=clear_cache)
        if self.slow:
            self.slow = False
            await asyncio.sleep(60)


@pytest.mark.parametrize("on_pause", ["abort", "keep"])
@pytest.mark.parametrize("again", [False, True])
def test_a_pause_that_is_cut_off_half_way_can_be_asked_for_again_and_taken_back(on_pause: OnPause, again: bool) -> None:
    async def test() -> None:
        play = Play(SlowCore())
        if on_pause == "keep":
            await play.ask("kept", "keep")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20):
                await play.door.pause()
        assert not play.door.paused
        if again:
            await play.door.pause()
            assert play.door.paused and play.core.frozen
        await play.door.resume()
        await play.ask("later", "abort")
        assert await play.outcome("later") == "done"

    play(test())
