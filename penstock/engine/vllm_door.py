"""Who is with vLLM and who waits before it: what a pause does to each request, over an engine that pauses as a whole.

A pause ends what is aborted, one by one, and freezes vLLM when a kept request is there and no served one: a kept
request goes on, under the weights that are loaded, while another is served. What is kept and new waits at the door, as
does everything that comes to an engine that sleeps. Nothing here imports vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Literal, Protocol

from penstock.engine.vllm_answers import Answer
from penstock.errors import RunError

_END_RETRY_S = 0.05


class Core(Protocol):
    """What is asked of `AsyncLLM` here."""

    async def pause_generation(self, *, mode: Literal["abort", "keep"], clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def abort(self, request_id: str | list[str]) -> None: ...

    async def get_weight_version(self) -> str: ...

    async def sleep(self, level: int) -> None: ...

    async def wake_up(self) -> None: ...


class Door:
    def __init__(self, core: Core, *, can_sleep: bool, on_change: Callable[[], None]) -> None:
        self._core = core
        self._can_sleep = can_sleep
        self._on_change = on_change
        self.inside: set[Answer] = set()
        self.before: set[Answer] = set()
        self.paused = False
        self.frozen = False
        """vLLM's scheduler stands still."""
        self.control = asyncio.Lock()
        """Pause, continue and weight updates, one at a time."""
        self._last: frozenset[Answer] | None = None
        """While asleep, or falling asleep: the requests that finish first. None: awake."""
        self._sent_away: set[Answer] = set()
        self._opened = asyncio.Event()
        """Set, and replaced, when those who wait may pass."""
        self._adjusting: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def passing(self, answer: Answer) -> AsyncGenerator[bool, None]:
        """Waits while it may not run. False: it was aborted before it could."""
        self.before.add(answer)
        try:
            while not self._may_run(answer) and answer not in self._sent_away:
                await self._opened.wait()
            self.before.discard(answer)
            if answer in self._sent_away:
                yield False
                return
            self.inside.add(answer)
            self._on_change()
            if self.frozen and self.paused:  # it is served: vLLM must run for it
                async with self.control:
                    await self._adjust()
            yield True
        finally:
            self.before.discard(answer)
            self.inside.discard(answer)
            self._sent_away.discard(answer)
            self._on_change()
            answer.ended.set()
            if self.paused and answer.on_pause == "serve":
                task = asyncio.create_task(self._adjust_later(), name="freeze what is kept")
                self._adjusting.add(task)
                task.add_done_callback(self._adjusting.discard)

    async def pause(self) -> None:
        async with self.control:
            if self.paused:
                return
            if self.frozen:  # or not: an earlier pause was cut off half way
                await self._core.resume_generation()
                self.frozen = False
            self.paused = True
            try:
                ending = [answer for answer in self.inside if answer.on_pause == "abort"]
                if len(ending) == len(self.inside):
                    # Before it is asked: cut off meanwhile, vLLM may stand still, and `resume` must know.
                    self.frozen = True
                    # Caches are for the same weights still; an update clears them.
                    await self._core.pause_generation(mode="abort", clear_cache=False)
                await self._end(ending)
                await self._adjust()
            except BaseException:
                # Or the next pause would find nothing to do.
                self.paused = False
                raise

    async def resume(self) -> None:
        async with self.control:
            await self._rouse()
            self.paused = False
            await self._adjust()
            self._open()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._sent_away |= {answer for answer in self.before if answer.request_id in request_ids}
        self._open()
        await self._end([answer for answer in self.inside if answer.request_id in request_ids])

    async def sleep(self) -> None:
        """Returns when what is here has ended and, on a GPU, the weights are moved away and the cache is dropped."""
        async with self.control:
            if not self.paused:
                raise RunError("the engine cannot sleep: it is not paused; pause it first")
            if self._last is None:
                self._last = frozenset(self.inside | self.before)
                await self._adjust()
                self._open()
            last = self._last
        for answer in last:
            await answer.ended.wait()
        async with self.control:
            if self._last is not last:
                raise RunError("the engine was woken before it slept")
            if self._can_sleep:
                await self._core.sleep(level=1)
                self.frozen = True

    async def wake(self) -> None:
        async with self.control:
            await self._rouse()
            await self._adjust()
            self._open()

    async def freeze(self) -> None:
        """Under `control`: for a weight update, whoever is inside."""
        await self._core.pause_generation(mode="keep", clear_cache=False)
        await self._settle()

    def _may_run(self, answer: Answer) -> bool:
        if self._last is not None:
            return answer in self._last
        return not self.paused or answer.on_pause == "serve"

    def _open(self) -> None:
        self._opened.set()
        self._opened = asyncio.Event()

    async def _rouse(self) -> None:
        if self._last is not None and self._can_sleep:
            await self._core.wake_up()
            self.frozen = False  # waking up starts vLLM's scheduler
        self._last = None

    async def _adjust_later(self) -> None:
        async with self.control:
            with contextlib.suppress(Exception):  # whoever asks next hears of it
                await self._adjust()

    async def _adjust(self) -> None:
        """Freeze vLLM, or let it run, as the requests that it has now need it."""
        kinds = {answer.on_pause for answer in self.inside}
        freeze = self.paused and self._last is None and "keep" in kinds and "serve" not in kinds
        if freeze and not self.frozen:
            self.frozen = True
            await self.freeze()
        elif self.frozen and not freeze and (self.inside or not self.paused):
            await self._core.resume_generation()
            self.frozen = False
        self._on_change()

    async def _end(self, answers: Iterable[Answer]) -> None:
        """Returns when these have ended. Asks again: a request that vLLM is still taking in is not known to it yet."""
        left = list(answers)
        while left := [answer for answer in left if not answer.ended.is_set()]:
            await self._core.abort([answer.request_id for answer in left])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_RETRY_S):
                    await left[0].ended.wait()

    async def _settle(self) -> None:
        """The tokens of the last step have arrived: they were sent before the answer to this call."""
        await self._core.get_weight_version()
        for _ in range(10):
            await asyncio.sleep(0)
