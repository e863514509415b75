"""How a manager stops: for new weights, after an error, when nothing moves, and at the end of the run."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from penstock.agent_loop import SingleTurnAgentLoop
from penstock.engine import RolloutControllerConfig
from penstock.errors import CircuitOpen, DeadlineExceeded, RunError
from penstock.produce import (
    AgentLoopManagerStatus,
    AsyncProduceStrategyConfig,
    FailurePolicyConfig,
    ProduceBatchStatus,
    ProduceContext,
    ProduceStrategy,
    ProduceStrategyConfig,
    SyncProduceStrategyConfig,
)
from penstock.replay import GroupState
from penstock.rollout import RolloutState, Status
from penstock.testing import EngineFaults, EngineScript, JudgerScript, ScriptedTask, ScriptedWorld, run_virtual

from .manager_parts import NORMAL, NewTask, Seconds, by_task, now, producing

PATIENT = RolloutControllerConfig(request_timeout_s=1e6)


# Pausing.


def test_a_pause_stores_everything_and_its_seconds_appear_once_in_the_next_result(
    asynchronous: NewTask, seconds: Seconds
) -> None:
    async def main() -> list[float]:
        task = asynchronous(max_staleness=3, enable_partial_rollout=True)
        world = ScriptedWorld([task], batch_size=2, engine=seconds(default=40, pause_s=4.0))
        loop = await producing(world)
        await asyncio.sleep(10)
        await world.manager.pause_produce()
        assert world.manager.tasks["task"].strategy.pending_task_count() == 0
        assert world.buffer.count("task", Status.ABORTED) == 2
        await world.manager.continue_produce(0)
        spent = [(await world.manager.get_batch(2, step)).pause_time_s for step in (1, 2)]
        await world.manager.shutdown()
        await loop
        return spent

    assert run_virtual(main()) == [4.0, 0.0]


class Watched(ProduceStrategy):
    """Notes what the manager does to it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.aborted: list[bool] = []

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        await ctx.changed.wait_until(ctx.should_abort)
        return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT

    async def pause_produce(self, ctx: ProduceContext) -> float:
        self.aborted.append(ctx.should_abort())
        await asyncio.sleep(self.seconds)
        return self.seconds


class WatchedConfig(ProduceStrategyConfig):
    seconds: float = 0.0

    def build(self, *, sync_weights_interval: int = 1) -> ProduceStrategy:
        return Watched(self.seconds)


def test_tasks_are_drained_together_after_the_signal_is_set() -> None:
    async def main() -> tuple[float, list[bool]]:
        tasks = [ScriptedTask(name=name, strategy=WatchedConfig(seconds=9.0)) for name in "ab"]
        world = ScriptedWorld(tasks)
        loop = await producing(world)
        await asyncio.sleep(1)
        await world.manager.pause_produce()
        at = now()
        seen = [s.aborted[0] for s in (t.strategy for t in world.manager.tasks.values()) if isinstance(s, Watched)]
        await world.manager.shutdown()
        await loop
        return at, seen

    assert run_virtual(main()) == (10.0, [True, True])


def test_a_pause_waits_for_a_strategy_that_is_slow_to_stop() -> None:
    class SlowToStop(Watched):
        async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
            status = await super().produce_batch(ctx)
            await asyncio.sleep(20)
            return status

    class SlowToStopConfig(ProduceStrategyConfig):
        def build(self, *, sync_weights_interval: int = 1) -> ProduceStrategy:
            return SlowToStop(0.0)

    async def main() -> float:
        world = ScriptedWorld([ScriptedTask(strategy=SlowToStopConfig())])
        loop = await producing(world)
        await asyncio.sleep(1)
        await world.manager.pause_produce()
        at = now()
        await world.manager.shutdown()
        await loop
        return at

    assert run_virtual(main()) == 21.0


def test_weight_sync_waits_for_a_protected_tail_batch(asynchronous: NewTask, seconds: Seconds) -> None:
    async def main() -> None:
        task = asynchronous(tail_batch_trigger_size=1, tail_batch_max_tries=1, prompt_repeat_k=1)
        world = ScriptedWorld([task], batch_size=1, engine=seconds(100))
        loop = await producing(world)
        await asyncio.sleep(30)
        await world.manager.pause_produce()
        assert world.buffer.count("task", Status.MAX_TRIES) == 1
        await world.manager.continue_produce(0)
        await asyncio.sleep(30)
        await world.manager.pause_produce()
        assert now() == pytest.approx(130.0)
        assert world.buffer.count("task", Status.COMPLETED) == 1
        await world.manager.shutdown()
        await loop

    run_virtual(main())


def test_a_protected_tail_batch_is_waited_for_only_up_to_the_deadline(asynchronous: NewTask, seconds: Seconds) -> None:
    async def main() -> float:
        task = asynchronous(tail_batch_trigger_size=1, tail_batch_max_tries=1, prompt_repeat_k=1, pause_timeout_s=50.0)
        world = ScriptedWorld([task], batch_size=1, engine=seconds(5000))
        loop = await producing(world)
        for _ in range(2):
            await asyncio.sleep(30)
            await world.manager.pause_produce()
            assert world.buffer.count("task", Status.MAX_TRIES) == 1
            await world.manager.continue_produce(0)
        at = now()
        await world.manager.shutdown()
        await loop
        return at

    assert run_virtual(main()) == pytest.approx(30 + 30 + 50)


# Errors.


def test_the_producers_exception_ends_get_batch_at_once_as_itself(asynchronous: NewTask, seconds: Seconds) -> None:
    def broken(samples: list[RolloutState]) -> bool:
        return False

    async def main() -> float:
        task = asynchronous(is_valid_sample_fn=broken, failures=FailurePolicyConfig(max_filtered_in_a_row=1))
        world = ScriptedWorld([task], engine=seconds(7))
        loop = await producing(world)
        with pytest.raises(CircuitOpen) as seen:
            await world.manager.get_batch(4, 1)
        at = now()
        with pytest.raises(CircuitOpen) as raised:
            await loop
        assert seen.value is raised.value
        await world.manager.shutdown()
        await world.close()
        assert len(asyncio.all_tasks()) == 1
        return at

    assert run_virtual(main()) == 7.0


def test_a_failure_in_one_tasks_drain_leaves_no_other_task_running(asynchronous: NewTask) -> None:
    def nothing_passes(samples: list[RolloutState]) -> bool:
        return False

    async def main() -> None:
        failing = asynchronous(
            name="failing", is_valid_sample_fn=nothing_passes, failures=FailurePolicyConfig(max_filtered_in_a_row=1)
        )
        engine = msgspec.structs.replace(by_task(failing=5, slow=100), pause_s=20.0)
        world = ScriptedWorld([failing, asynchronous(name="slow")], engine=engine)
        loop = await producing(world)
        await asyncio.sleep(4)
        with pytest.raises(CircuitOpen):
            await world.manager.shutdown()
        await asyncio.gather(loop, return_exceptions=True)
        assert [task.strategy.pending_task_count() for task in world.manager.tasks.values()] == [0, 0]
        assert world.buffer.count("slow", Status.ABORTED) == 2
        await world.close()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_a_cancelled_producer_ends_get_batch() -> None:
    async def main() -> None:
        world = ScriptedWorld([ScriptedTask(strategy=AsyncProduceStrategyConfig())])
        loop = await producing(world)
        asked = asyncio.create_task(world.manager.get_batch(4, 1))
        await asyncio.sleep(0.01)
        loop.cancel()
        with pytest.raises(RunError, match="cancelled"):
            await asked
        await world.manager.shutdown()

    run_virtual(main())


def test_a_cancelled_producer_leaves_no_group_playing(asynchronous: NewTask, seconds: Seconds) -> None:
    async def main() -> set[str]:
        world = ScriptedWorld([asynchronous()], engine=seconds(1000))
        loop = await producing(world)
        await asyncio.sleep(1)
        loop.cancel()
        await asyncio.wait([loop])
        await asyncio.sleep(1)
        playing = {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(("group", "rollout"))}
        await world.manager.shutdown()
        return playing

    assert run_virtual(main()) == set()


# The watchdog.


def test_a_stalled_run_ends_with_the_stage_and_the_oldest_rollout(asynchronous: NewTask) -> None:
    async def main() -> None:
        task = asynchronous(prompt_repeat_k=1, pause_timeout_s=10.0)
        engine = EngineScript(faults=EngineFaults(hangs=1.0))
        world = ScriptedWorld([task], batch_size=2, engine=engine, controller=PATIENT, stall_timeout_s=100.0)
        loop = await producing(world)
        try:
            await world.manager.get_batch(2, 1)
        finally:
            assert now() == pytest.approx(100.0)
            await world.manager.shutdown()
            await asyncio.gather(loop, return_exceptions=True)
            await world.close()
            assert len(asyncio.all_tasks()) == 1

    expected = r"no group finished for 100 s\. The oldest of 2 groups is task:0, playing for 100 s: task:0:0 in engine"
    with pytest.raises(DeadlineExceeded, match=expected):
        run_virtual(main())


def test_a_stalled_judge_is_named_too() -> None:
    task = ScriptedTask(judger=JudgerScript(hangs=1.0), judge_timeout_s=1e6)
    task.strategy = SyncProduceStrategyConfig(pause_timeout_s=5.0)
    world = ScriptedWorld([task], stall_timeout_s=100.0)
    with pytest.raises(DeadlineExceeded, match=r"task:0:0 in judger.*due 4, consumed 0, pending 4"):
        run_virtual(world.manager.produce_batch(4, 1, model_step=0))


def test_finished_groups_keep_the_watchdog_quiet_however_long_the_batch_takes(seconds: Seconds) -> None:
    world = ScriptedWorld(engine=seconds(default=90, slots=2), batch_size=6, stall_timeout_s=100.0)
    result = run_virtual(world.manager.produce_batch(6, 1, model_step=0))
    assert result.produce_time_s == pytest.approx(540.0)


def test_waiting_for_a_batch_nobody_produces_ends_too(asynchronous: NewTask) -> None:
    world = ScriptedWorld([asynchronous()], stall_timeout_s=100.0)
    with pytest.raises(DeadlineExceeded, match="No group is being played"):
        run_virtual(world.manager.get_batch(4, 1))


# Ending.


def test_after_shutdown_a_batch_is_empty_and_normal_and_nothing_runs(asynchronous: NewTask) -> None:
    async def main() -> None:
        world = ScriptedWorld([asynchronous()])
        loop = await producing(world)
        asked = asyncio.create_task(world.manager.get_batch(4, 1))
        await asyncio.sleep(0.01)
        await world.manager.shutdown()
        await loop
        result = await asked
        assert (result.groups, result.status) == ([], NORMAL)
        assert (await world.manager.get_batch(4, 1)).groups == []
        await world.manager.continue_produce(3)
        assert world.manager.status is AgentLoopManagerStatus.FINISH
        assert world.buffer.state_count("task", GroupState.RUNNING) == 0
        await world.close()
        assert len(asyncio.all_tasks()) == 1
        world.check()

    run_virtual(main())


class NoticesItsEnd(SingleTurnAgentLoop):
    closed = 0

    async def close(self) -> None:
        type(self).closed += 1


@pytest.mark.parametrize("disaggregated", [True, False])
def test_the_agent_loops_are_closed_once_in_both_modes(asynchronous: NewTask, disaggregated: bool) -> None:
    async def main() -> int:
        NoticesItsEnd.closed = 0
        world = ScriptedWorld([asynchronous(loop=NoticesItsEnd, name=name) for name in "ab"])
        if disaggregated:
            loop = await producing(world)
            await world.manager.get_batch(4, 1)
            await world.manager.shutdown()
            await loop
        else:
            await world.manager.produce_batch(4, 1, model_step=0)
            await world.manager.close()
        await world.manager.close()
        return NoticesItsEnd.closed

    assert run_virtual(main()) == 2


class BreaksTwice(ProduceStrategy):
    """Fails, and fails again as it is drained."""

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        await asyncio.sleep(1)
        raise CircuitOpen("the first error")

    async def pause_produce(self, ctx: ProduceContext) -> float:
        raise OSError("an error of the drain")


class BreaksTwiceConfig(ProduceStrategyConfig):
    def build(self, *, sync_weights_interval: int = 1) -> ProduceStrategy:
        return BreaksTwice()


def test_an_error_of_the_final_drain_does_not_replace_the_first(caplog: pytest.LogCaptureFixture) -> None:
    world = ScriptedWorld([ScriptedTask(strategy=BreaksTwiceConfig())])
    with pytest.raises(CircuitOpen, match="the first error"):
        run_virtual(world.manager.produce_batch(4, 1, model_step=0))
    assert "an error of the drain" in caplog.text


def test_shutting_down_after_a_failed_producer_raises_nothing_new(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = ScriptedWorld([ScriptedTask(strategy=BreaksTwiceConfig(), loop=NoticesItsEnd)])
        NoticesItsEnd.closed = 0
        loop = await producing(world)
        try:
            await world.manager.get_batch(4, 1)
        finally:
            await world.manager.shutdown()
            await asyncio.gather(loop, return_exceptions=True)
            await world.close()
            assert NoticesItsEnd.closed == 1
            assert len(asyncio.all_tasks()) == 1

    with pytest.raises(CircuitOpen, match="the first error"):
        run_virtual(main())
    assert "an error of the drain" in caplog.text
