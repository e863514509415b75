from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.engine import RolloutControllerConfig
from penstock.errors import InfrastructureFailure
from penstock.produce.pause import PauseDeadlines
from penstock.rollout import Status
from penstock.testing import EngineFaults, EngineScript, ScriptedEngine, ScriptedTask, ScriptedWorld, run_virtual

Seconds = Callable[..., EngineScript]
NewTask = Callable[..., ScriptedTask]


class HardOfHearing(ScriptedEngine):
    """Raises, or does not answer, until it was asked often enough."""

    def __init__(self, script: EngineScript, *, hears_at: int, error: Exception | None) -> None:
        super().__init__(script)
        self.hears_at = hears_at
        self.error = error
        self.asked: list[float] = []

    async def pause_generation(self) -> None:
        self.asked.append(asyncio.get_running_loop().time())
        if len(self.asked) < self.hears_at:
            if self.error is not None:
                raise self.error
            await asyncio.get_running_loop().create_future()
        await super().pause_generation()


class Deaf(HardOfHearing):
    """Says yes and does nothing, until it was asked often enough."""

    async def pause_generation(self) -> None:
        self.asked.append(asyncio.get_running_loop().time())
        if len(self.asked) >= self.hears_at:
            await ScriptedEngine.pause_generation(self)


async def pause_at_ten(world: ScriptedWorld) -> float:
    """Seconds that a pause takes that begins at 10 s."""
    loop = asyncio.create_task(world.manager.produce_loop(world.batch_size))
    await world.manager.continue_produce(0)
    await asyncio.sleep(10)
    await world.manager.pause_produce()
    spent = asyncio.get_running_loop().time() - 10
    assert world.manager.tasks["task"].strategy.pending_task_count() == 0
    await world.manager.shutdown()
    await loop
    return spent


@pytest.mark.parametrize(
    ("error", "spent"),
    [
        (InfrastructureFailure("unreachable"), 10.0),
        (ConnectionResetError("gone"), 10.0),
        (None, 34.0),
    ],
)
def test_a_pause_that_fails_is_reported_and_asked_again_and_never_ends_the_drain(
    asynchronous: NewTask,
    seconds: Seconds,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
    spent: float,
) -> None:
    engine = HardOfHearing(seconds(default=200), hears_at=3, error=error)
    deadlines = PauseDeadlines(request_timeout_s=12.0, resend_interval_s=5.0)
    world = ScriptedWorld([asynchronous()], engine=engine, pause_deadlines=deadlines)
    assert run_virtual(pause_at_ten(world)) == pytest.approx(spent)
    assert world.buffer.count("task", Status.ABORTED) == 4
    assert caplog.text.count("pausing the engines failed") == 2


def test_a_pause_is_sent_again_while_something_still_runs(asynchronous: NewTask, seconds: Seconds) -> None:
    engine = Deaf(seconds(default=200), hears_at=4, error=None)
    world = ScriptedWorld([asynchronous()], engine=engine)
    assert run_virtual(pause_at_ten(world)) == pytest.approx(15.0)
    assert engine.asked[:4] == pytest.approx([10.0, 15.0, 20.0, 25.0])


def test_with_interval_zero_the_pause_is_asked_for_once(asynchronous: NewTask, seconds: Seconds) -> None:
    engine = Deaf(seconds(default=200), hears_at=4, error=None)
    deadlines = PauseDeadlines(resend_interval_s=0.0)
    task = asynchronous(pause_timeout_s=60.0)
    world = ScriptedWorld([task], engine=engine, pause_deadlines=deadlines)
    assert run_virtual(pause_at_ten(world)) == pytest.approx(60.0)
    assert engine.asked[0] == 10.0
    assert len(engine.asked) == 2  # The second one is the shutdown's.


def test_engines_continue_before_the_signal_is_cleared(asynchronous: NewTask) -> None:
    class Slow(ScriptedEngine):
        async def continue_generation(self) -> None:
            await asyncio.sleep(20)
            await super().continue_generation()

    async def main() -> tuple[int, int]:
        world = ScriptedWorld([asynchronous()], engine=Slow())
        loop = asyncio.create_task(world.manager.produce_loop(4))
        continuing = asyncio.create_task(world.manager.continue_produce(0))
        await asyncio.sleep(19)
        before = world.buffer.conservation("task").drawn
        await continuing
        await asyncio.sleep(0.01)
        after = world.buffer.conservation("task").drawn
        await world.manager.shutdown()
        await loop
        return before, after

    assert run_virtual(main()) == (0, 4)


def test_a_rollout_that_hears_nothing_is_cancelled_after_the_timeout(asynchronous: NewTask, seconds: Seconds) -> None:
    script = seconds(default=5, faults=EngineFaults(hangs=1.0))
    patient = RolloutControllerConfig(request_timeout_s=1e6)
    world = ScriptedWorld([asynchronous(pause_timeout_s=300.0)], engine=script, controller=patient)
    assert run_virtual(pause_at_ten(world)) == pytest.approx(300.0)
    assert world.buffer.count("task", Status.ABORTED) == 4
    world.check()
