"""The line before the engines: who is seated next, while they run and while they are paused."""

from __future__ import annotations

import asyncio

import pytest

from penstock.engine.config import RolloutControllerConfig
from penstock.engine.health import Fleet, Standing
from penstock.engine.routing import Router, Ticket
from penstock.errors import EngineUnavailable
from penstock.events import Nobody
from penstock.ports import OnPause
from penstock.testing import ScriptedEngine, run_virtual


class Play:
    """Two engines with two places each, and who was given one, in order."""

    def __init__(self, judge_places: int = 0) -> None:
        engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
        self.fleet = Fleet(engines, RolloutControllerConfig(), Standing(), Nobody())
        self.router = Router(self.fleet, 2, judge_places)
        self.fleet.on_change = self.router.assign
        self.fleet.start()
        self.seated: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def recover(self) -> None:
        for member in self.fleet.members:
            self.fleet.recovered(member, 0)

    async def ask(self, *names: str, on_pause: OnPause, judging: bool = False) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._sit(Ticket(name, "", on_pause, judging)))
        await asyncio.sleep(0.1)

    async def have_judged(self) -> None:
        """From then on places are kept for judges."""
        await self.ask("j0", on_pause="serve", judging=True)
        await self.tasks.pop("j0")
        self.seated.clear()

    async def _sit(self, ticket: Ticket) -> None:
        member = await self.router.take_place(ticket)
        assert member is not None
        self.seated.append(ticket.request_id)
        try:
            await asyncio.sleep(1)
        finally:
            self.router.leave(member, ticket)

    async def end(self) -> None:
        await asyncio.gather(*self.tasks.values())
        assert self.router.waiting == 0


def test_those_who_are_passed_over_in_a_pause_keep_their_places_in_line() -> None:
    async def main() -> list[str]:
        play = Play()
        play.recover()
        play.fleet.paused = True
        await play.ask("k1", "k2", "k3", on_pause="keep")
        await play.ask("s1", "s2", "s3", "s4", "s5", on_pause="serve")
        await play.ask("k4", "k5", on_pause="keep")
        assert play.seated == ["s1", "s2", "s3", "s4"]
        await asyncio.sleep(1)
        assert play.seated[4:] == ["s5"]
        play.fleet.paused = False
        play.router.assign()
        await play.end()
        return play.seated[5:]

    assert run_virtual(main()) == ["k1", "k2", "k3", "k4", "k5"]


def test_a_frozen_request_holds_no_place_until_it_goes_on() -> None:
    async def main() -> None:
        play = Play()
        play.recover()
        await play.ask("k1", "k2", "k3", "k4", on_pause="keep")
        play.fleet.paused = True
        await play.ask("s1", "s2", "s3", "s4", "s5", on_pause="serve")
        assert play.seated[4:] == ["s1", "s2", "s3", "s4"]
        play.fleet.paused = False
        await play.ask("late", on_pause="abort")
        assert "late" not in play.seated
        await play.end()

    run_virtual(main())


@pytest.mark.parametrize("on_pause", ["keep", "serve"])
def test_nobody_waits_in_a_pause_for_engines_that_were_given_up(on_pause: OnPause) -> None:
    async def main() -> None:
        play = Play()
        play.recover()
        play.fleet.paused = True
        for member in play.fleet.members:
            play.fleet.fence(member, "gone")
            play.fleet.recovering(member, restarted=True)
            play.fleet.refused(member, "gone for good")
        assert play.fleet.unavailable is not None
        await play.ask("late", on_pause=on_pause)
        await play.end()

    with pytest.raises(EngineUnavailable):
        run_virtual(main())


def test_a_judge_goes_before_those_who_wait() -> None:
    async def main() -> list[str]:
        play = Play()
        play.recover()
        await play.ask(*"abcdefgh", on_pause="abort")
        await play.ask("j1", "j2", on_pause="serve", judging=True)
        assert play.seated == ["a", "b", "c", "d"]
        await play.end()
        return play.seated

    assert run_virtual(main()) == ["a", "b", "c", "d", "j1", "j2", "e", "f", "g", "h"]


def test_places_of_judges_are_kept_for_them_and_the_others_are_everybodys() -> None:
    async def main() -> tuple[list[str], list[str], list[str]]:
        play = Play(judge_places=1)
        play.recover()
        await play.have_judged()
        await play.ask(*"abcd", on_pause="abort")
        rollouts = list(play.seated)
        await play.ask("j1", "j2", "j3", on_pause="serve", judging=True)
        both = list(play.seated)
        await play.end()
        return rollouts, both, play.seated

    rollouts, both, all_of_them = run_virtual(main())
    assert rollouts == ["a", "b"]  # one place of each engine is kept
    assert both == ["a", "b", "j1", "j2"]
    assert all_of_them == ["a", "b", "j1", "j2", "j3", "c", "d"]


def test_a_judge_is_seated_while_the_engines_are_paused_and_full_of_frozen_requests() -> None:
    async def main() -> list[str]:
        play = Play(judge_places=1)
        play.recover()
        await play.have_judged()
        await play.ask("k1", "k2", "k3", on_pause="keep")
        play.fleet.paused = True
        await play.ask("j1", "j2", "j3", on_pause="serve", judging=True)
        seated = list(play.seated)
        play.fleet.paused = False
        await play.end()
        return seated

    assert run_virtual(main()) == ["k1", "k2", "j1", "j2", "j3"]


def test_a_judge_that_is_cancelled_in_line_leaves_it() -> None:
    async def main() -> int:
        play = Play()
        play.recover()
        await play.ask(*"abcd", on_pause="abort")
        await play.ask("j1", on_pause="serve", judging=True)
        play.tasks.pop("j1").cancel()
        await asyncio.sleep(0.1)
        waiting = play.router.waiting
        await play.end()
        return waiting

    assert run_virtual(main()) == 0
