from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.agent_loop import SingleTurnAgentLoop
from penstock.engine import RolloutControllerConfig
from penstock.errors import CircuitOpen, DeadlineExceeded, RunError
from penstock.events import Event, StageBegan, StageEnded, TaskProgress
from penstock.ports import GenerateRequest
from penstock.produce import (
    AgentLoopManager,
    AgentLoopManagerStatus,
    AsyncProduceStrategyConfig,
    FailurePolicyConfig,
    ProduceBatchStatus,
    ProduceContext,
    ProduceStrategy,
    ProduceStrategyConfig,
    SyncProduceStrategyConfig,
)
from penstock.replay import GroupState, Restored
from penstock.rollout import Group, RolloutState, Status
from penstock.testing import EngineFaults, EngineScript, JudgerScript, ScriptedTask, ScriptedWorld, run_virtual

Seconds = Callable[..., EngineScript]
NewTask = Callable[..., ScriptedTask]

EXPIRED = ProduceBatchStatus.EXPIRED_BATCH
NORMAL = ProduceBatchStatus.NORMAL
PATIENT = RolloutControllerConfig(request_timeout_s=1e6)


def now() -> float:
    return asyncio.get_running_loop().time()


def ids(groups: list[Group]) -> list[str]:
    return sorted(group[0].group_id for group in groups)


def by_task(**lengths: int) -> EngineScript:
    """An engine that takes the given seconds for each task's answers."""

    def answers(request: GenerateRequest) -> list[int]:
        return [97] * lengths[request.group_id.split(":")[0]]

    return EngineScript(tokens_per_s=1.0, answers=answers)


async def producing(world: ScriptedWorld, model_step: int = 0) -> asyncio.Task[None]:
    task = asyncio.create_task(world.manager.produce_loop(world.batch_size), name="produce loop")
    await world.manager.continue_produce(model_step)
    return task


async def train(world: ScriptedWorld, train_step: int) -> list[Group]:
    result = await world.manager.get_batch(world.batch_size, train_step)
    await world.manager.commit(train_step)
    world.history.consumed(train_step, result.groups, trained=True)
    return result.groups


# Colocated.


def test_a_colocated_batch_is_exact_and_leaves_nothing_running() -> None:
    async def main() -> None:
        world = ScriptedWorld(batch_size=3)
        result = await world.manager.produce_batch(3, 1, model_step=0)
        assert len(result.groups) == 3
        assert result.status is NORMAL
        assert world.buffer.state_count("task", GroupState.RUNNING) == 0
        assert world.buffer.state_count("task", GroupState.LEASED) == 3
        await world.close()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_a_fast_task_never_pauses_a_slow_one() -> None:
    async def main() -> tuple[float, list[str], int]:
        tasks = [ScriptedTask(name="fast"), ScriptedTask(name="slow")]
        world = ScriptedWorld(tasks, batch_size=2, engine=by_task(fast=1, slow=150))
        result = await world.manager.produce_batch(2, 1, model_step=0)
        return now(), ids(result.groups), max(r.num_tries for group in result.groups for r in group)

    assert run_virtual(main()) == (150.0, ["fast:0", "slow:0"], 0)


def test_a_refused_step_does_not_starve_the_next_one() -> None:
    async def main() -> tuple[list[str], list[str], float]:
        world = ScriptedWorld(batch_size=3)
        first = ids((await world.manager.produce_batch(3, 1, model_step=0)).groups)
        await world.manager.return_batch(1)
        asked = now()
        again = ids((await world.manager.produce_batch(3, 1, model_step=0)).groups)
        waited = now() - asked
        await world.manager.commit(1)
        await world.load_weights(1)
        assert len((await world.manager.produce_batch(3, 2, model_step=1)).groups) == 3
        world.check()
        return first, again, waited

    first, again, waited = run_virtual(main())
    assert first == again
    assert waited == 0.0


def test_over_sampled_groups_are_stored_and_used_first_by_the_next_step(
    asynchronous: NewTask, seconds: Seconds
) -> None:
    async def main() -> tuple[int, list[str]]:
        task = asynchronous(over_sample_threshold=1.0, enable_partial_rollout=True, max_staleness=1)
        world = ScriptedWorld([task], batch_size=2, engine=seconds(2, 9, 9, 2, 5))
        await world.manager.produce_batch(2, 1, model_step=0)
        await world.manager.commit(1)
        aborted = world.buffer.count("task", Status.ABORTED)
        await world.load_weights(1)
        result = await world.manager.produce_batch(2, 2, model_step=1)
        return aborted, ids(result.groups)

    assert run_virtual(main()) == (2, ["task:1", "task:2"])


def test_a_short_batch_is_drained_and_taken_as_it_is(seconds: Seconds) -> None:
    def at_most_one(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
        return completed_count < 1

    async def main() -> list[str]:
        strategy = SyncProduceStrategyConfig(should_continue_fn=at_most_one)
        world = ScriptedWorld([ScriptedTask(strategy=strategy)], batch_size=3, engine=seconds(2, 50, 50))
        result = await world.manager.produce_batch(3, 1, model_step=0)
        assert world.buffer.count("task", Status.ABORTED) == 2
        return ids(result.groups)

    assert run_virtual(main()) == ["task:0"]


def test_an_empty_colocated_batch_is_an_error() -> None:
    def never(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
        return False

    world = ScriptedWorld([ScriptedTask(strategy=SyncProduceStrategyConfig(should_continue_fn=never))])
    with pytest.raises(RunError, match=r"train step 1: no group was produced.*due 4"):
        run_virtual(world.manager.produce_batch(4, 1, model_step=0))


def test_staleness_of_all_tasks_is_refreshed_before_producing() -> None:
    async def main() -> dict[str, int]:
        world = ScriptedWorld(batch_size=2)
        await world.manager.produce_batch(2, 1, model_step=0)
        await world.manager.return_batch(1)
        await world.load_weights(1)
        await world.manager.produce_batch(2, 2, model_step=1)
        return dict(world.buffer.discarded("task"))

    assert run_virtual(main()) == {"expired": 2}


# Disaggregated.


def test_the_loop_waits_for_the_first_continue(asynchronous: NewTask) -> None:
    async def main() -> tuple[int, AgentLoopManagerStatus]:
        world = ScriptedWorld([asynchronous()])
        loop = asyncio.create_task(world.manager.produce_loop(4))
        await asyncio.sleep(100)
        status = world.manager.status
        loop.cancel()
        return world.buffer.conservation("task").drawn, status

    assert run_virtual(main()) == (0, AgentLoopManagerStatus.UPDATE_WEIGHT_AND_ABORT)


def test_a_batch_that_becomes_ready_wakes_the_consumer_at_once(asynchronous: NewTask, seconds: Seconds) -> None:
    async def main() -> float:
        world = ScriptedWorld([asynchronous()], batch_size=2, engine=seconds(3, 17))
        loop = await producing(world)
        await world.manager.get_batch(2, 1)
        at = now()
        await world.manager.shutdown()
        await loop
        return at

    assert run_virtual(main()) == 17.0


def test_the_producer_runs_ahead_exactly_as_far_as_its_weights_may_serve(asynchronous: NewTask) -> None:
    async def main() -> tuple[int, AgentLoopManagerStatus, int]:
        task = asynchronous(max_staleness=2, enable_partial_rollout=True)
        world = ScriptedWorld([task], batch_size=2, sync_weights_interval=2)
        loop = await producing(world)
        await asyncio.sleep(5000)
        found = world.buffer.count("task", Status.COMPLETED), world.manager.status
        step = world.manager.progress.producer_future_step
        await world.manager.shutdown()
        await loop
        return *found, step

    # Threshold 6: steps 1 to 6 may be served by weights 0.
    assert run_virtual(main()) == (12, AgentLoopManagerStatus.EXPIRED_BATCH, 7)


def test_what_is_too_stale_for_the_asked_step_is_not_handed_out(asynchronous: NewTask) -> None:
    async def main() -> tuple[dict[int, int], dict[str, int]]:
        world = ScriptedWorld([asynchronous()])
        loop = await producing(world)
        await asyncio.sleep(1000)
        await world.sync_weights(1)
        result = await world.manager.get_batch(4, 2)
        await world.manager.shutdown()
        await loop
        return result.tasks["task"].staleness, result.tasks["task"].discarded

    assert run_virtual(main()) == ({0: 4}, {"expired": 4})


def test_steps_move_when_a_batch_is_asked_for_and_when_it_is_handed_out(asynchronous: NewTask) -> None:
    async def main() -> list[int]:
        world = ScriptedWorld([asynchronous(max_staleness=1, enable_partial_rollout=True)])
        loop = await producing(world)
        steps = [world.manager.progress.next_consumer_step]
        await world.manager.get_batch(4, 1)
        steps.append(world.manager.progress.next_consumer_step)
        await world.manager.return_batch(1)
        steps.append(world.manager.progress.next_consumer_step)
        await world.manager.get_batch(4, 1)
        steps.append(world.manager.progress.next_consumer_step)
        await world.manager.shutdown()
        await loop
        return steps

    assert run_virtual(main()) == [1, 2, 1, 2]


def test_an_expired_producer_without_newer_weights_hands_out_the_ready_batch(asynchronous: NewTask) -> None:
    async def main() -> tuple[ProduceBatchStatus, int]:
        world = ScriptedWorld([asynchronous()], batch_size=2)
        loop = await producing(world)
        await asyncio.sleep(1000)
        result = await world.manager.get_batch(2, 1)
        await world.manager.shutdown()
        await loop
        return result.status, len(result.groups)

    assert run_virtual(main()) == (EXPIRED, 2)


def test_when_newer_weights_exist_an_expired_producer_gives_an_empty_batch_even_if_one_is_ready(
    asynchronous: NewTask,
) -> None:
    async def main() -> tuple[list[int], ProduceBatchStatus, int]:
        task = asynchronous(max_staleness=1, enable_partial_rollout=True)
        world = ScriptedWorld([task], batch_size=2, sync_weights_interval=1)
        loop = await producing(world)
        await asyncio.sleep(1000)
        await world.manager.get_batch(2, 1)
        await world.manager.commit(1)
        window = world.manager.progress.windows["task"]
        window.filtered = 5
        ready = world.buffer.count("task", Status.COMPLETED)
        result = await world.manager.get_batch(2, 2)
        assert window.filtered == 5
        assert world.manager.progress.next_consumer_step == 2
        await world.sync_weights(1)
        again = await world.manager.get_batch(2, 2)
        await world.manager.shutdown()
        await loop
        return [ready, len(result.groups)], result.status, len(again.groups)

    assert run_virtual(main()) == ([2, 0], EXPIRED, 2)


def test_expired_without_newer_weights_and_without_a_batch_is_an_error_with_all_counts() -> None:
    class Tired(ProduceStrategy):
        async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
            return EXPIRED

        def is_model_expired(self, train_step: int, model_step: int) -> bool:
            return True

    class TiredConfig(ProduceStrategyConfig):
        def build(self, *, sync_weights_interval: int = 1) -> ProduceStrategy:
            return Tired()

    async def main() -> None:
        world = ScriptedWorld([ScriptedTask(strategy=TiredConfig())])
        loop = await producing(world)
        try:
            await world.manager.get_batch(4, 1)
        finally:
            await world.manager.shutdown()
            await loop

    with pytest.raises(RunError, match=r"train step 1: the batch \{'task': 4\} is not ready.*due 0, consumed 0"):
        run_virtual(main())


def test_a_refused_disaggregated_step_gets_the_same_groups_and_the_bound_holds(asynchronous: NewTask) -> None:
    async def main() -> tuple[list[str], list[str]]:
        world = ScriptedWorld([asynchronous(over_sample_threshold=0.5)])
        loop = await producing(world)
        first = await world.manager.get_batch(4, 1)
        await world.manager.return_batch(1)
        assert world.manager.progress.consumed_samples == {"task": 0}
        world.check_bound()
        await asyncio.sleep(1000)
        world.check_bound()
        again = await world.manager.get_batch(4, 1)
        await world.manager.shutdown()
        await loop
        return ids(first.groups), ids(again.groups)

    first, again = run_virtual(main())
    assert first == again


def test_a_batch_that_was_taken_is_not_a_shortage_and_a_group_that_expired_is(asynchronous: NewTask) -> None:
    async def main() -> list[int]:
        task = asynchronous(max_staleness=1, enable_partial_rollout=True)
        world = ScriptedWorld([task], batch_size=2)
        loop = await producing(world)
        await asyncio.sleep(1000)
        drawn = [world.buffer.conservation("task").drawn]
        await world.manager.get_batch(2, 1)
        await asyncio.sleep(1000)
        drawn.append(world.buffer.conservation("task").drawn)
        await world.manager.pause_produce()
        await world.load_weights(2)
        world.buffer.refresh_staleness(3)
        await world.manager.continue_produce(2)
        await asyncio.sleep(1000)
        drawn.append(world.buffer.conservation("task").drawn)
        await world.manager.shutdown()
        await loop
        return drawn

    # Steps 1 and 2 by weights 0; two of step 2 expired; steps 3 and 4 by weights 2.
    assert run_virtual(main()) == [4, 4, 10]


def test_what_a_task_loses_while_another_one_is_busy_is_made_up_at_once(asynchronous: NewTask) -> None:
    async def main() -> list[int]:
        tasks = [asynchronous(name="quick"), asynchronous(name="slow")]
        world = ScriptedWorld(tasks, batch_size=2, engine=by_task(quick=5, slow=1000))
        loop = await producing(world)
        await asyncio.sleep(50)
        counts = [world.buffer.count("quick", Status.COMPLETED)]
        world.buffer.refresh_staleness(2, ["quick"])
        counts.append(world.buffer.count("quick", Status.COMPLETED))
        await asyncio.sleep(50)
        counts.append(world.buffer.count("quick", Status.COMPLETED))
        await world.manager.shutdown()
        await loop
        return counts

    assert run_virtual(main()) == [1, 0, 1]


def test_a_task_without_a_share_of_the_step_still_makes_up_for_what_expired(asynchronous: NewTask) -> None:
    async def main() -> list[str]:
        tasks = [
            asynchronous(name="big", weight=9.0, max_staleness=5, enable_partial_rollout=True),
            asynchronous(name="rare", weight=1.0),
        ]
        world = ScriptedWorld(tasks, batch_size=1)
        shares = [world.manager.get_task_batch_sizes(1, step)["rare"] for step in range(1, 11)]
        rare_step = shares.index(1) + 1
        loop = await producing(world)
        for step in range(1, rare_step):
            result = await world.manager.get_batch(1, step)
            if not result.groups:
                await world.sync_weights(step - 1)
                await world.manager.get_batch(1, step)
            await world.manager.commit(step)
            await world.sync_weights(step)
        await asyncio.sleep(500)
        assert world.buffer.count("rare", Status.COMPLETED) == 1
        world.buffer.refresh_staleness(rare_step + 1, ["rare"])
        assert world.buffer.count("rare", Status.COMPLETED) == 0
        result = await world.manager.get_batch(1, rare_step)
        await world.manager.shutdown()
        await loop
        return ids(result.groups)

    assert run_virtual(main(), deadline=1e6) == ["rare:1"]


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


def test_a_user_strategy_needs_no_more_than_produce_batch() -> None:
    class Plain(ProduceStrategy):
        async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
            for _ in range(ctx.task_batch_size):
                await ctx.put_generated_group(await ctx.generate_group(await ctx.sample_group()))
            return NORMAL

    class PlainConfig(ProduceStrategyConfig):
        def build(self, *, sync_weights_interval: int = 1) -> ProduceStrategy:
            return Plain()

    world = ScriptedWorld([ScriptedTask(strategy=PlainConfig())])
    assert len(run_virtual(world.manager.produce_batch(4, 1, model_step=0)).groups) == 4


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


# Batch sizes, results, saving.


@pytest.mark.parametrize("answer", [{"a": 4}, {"a": 2, "b": 1}, {"a": 5, "b": -1}, {"a": 2, "b": 2, "c": 0}])
def test_the_answer_of_an_overridden_split_is_checked(answer: dict[str, int]) -> None:
    class Mine(AgentLoopManager):
        def get_task_batch_sizes(self, batch_size: int, train_step: int) -> dict[str, int]:
            return answer

    world = ScriptedWorld([ScriptedTask(name="a"), ScriptedTask(name="b")], manager_class=Mine)
    with pytest.raises(RunError, match=r"get_task_batch_sizes\(4, 1\) answered"):
        run_virtual(world.manager.produce_batch(4, 1, model_step=0))


def test_a_result_tells_what_it_took(asynchronous: NewTask, seconds: Seconds) -> None:
    async def main() -> None:
        task = asynchronous(over_sample_threshold=0.5, prompt_repeat_k=2)
        world = ScriptedWorld([task], batch_size=2, engine=seconds(10, 20, 100))
        result = await world.manager.produce_batch(2, 1, model_step=0)
        mine = result.tasks["task"]
        assert (mine.groups, mine.group_time_count) == (2, 2)
        assert mine.group_time_mean_s == mine.group_time_p50_s == 15.0
        assert 1.0 < mine.group_time_p99_to_p50 < 20 / 15
        assert mine.leftover == {"completed": 2, "aborted": 1, "expired": 0, "max_tries": 0} | {"completed": 0}
        assert (mine.raw_reward_count, mine.produced_rollouts) == (4, 6)
        assert mine.produced_tokens == 2 * (10 + 20 + 20)
        assert result.wasted_tokens == {"aborted": 40}
        assert mine.staleness == {0: 2}
        assert result.produce_time_s == 20.0
        assert result.metrics()["tokens/wasted/aborted"] == 40.0

    run_virtual(main())


def test_the_window_survives_an_empty_batch_and_is_zeroed_by_the_next_full_one(asynchronous: NewTask) -> None:
    async def main() -> list[int]:
        world = ScriptedWorld([asynchronous(max_staleness=1, enable_partial_rollout=True)], batch_size=2)
        loop = await producing(world)
        await asyncio.sleep(1000)
        counts = [(await world.manager.get_batch(2, 1)).tasks["task"].produced_rollouts]
        await world.manager.commit(1)
        world.manager.progress.windows["task"].produced_rollouts = 7
        assert not (await world.manager.get_batch(2, 2)).groups
        await world.sync_weights(1)
        counts.append((await world.manager.get_batch(2, 2)).tasks["task"].produced_rollouts)
        await world.manager.shutdown()
        await loop
        return counts

    assert run_virtual(main()) == [8, 7]


def test_progress_saved_while_groups_are_pending_misses_none(asynchronous: NewTask) -> None:
    async def main() -> None:
        task = asynchronous(max_staleness=2, over_sample_threshold=1.0, enable_partial_rollout=True)
        world = ScriptedWorld([task], batch_size=2, flush_s=lambda rng: rng.uniform(0, 2))
        loop = await producing(world)
        for _ in range(200):
            await asyncio.sleep(0.1)
            states = world.buffer.conservation("task").states
            strategy = world.manager.tasks["task"].strategy
            saved = world.manager.progress.state_dict()
            assert sum(states.values()) == world.manager.tasks["task"].runtime.sampler.cursor
            assert strategy.pending_task_count() >= states[GroupState.RUNNING]
            assert saved["consumed_samples"]["task"] == states[GroupState.LEASED] + states[GroupState.TRAINED]
        await world.manager.shutdown()
        await loop

    run_virtual(main(), seed=1)


def test_a_whole_run_loses_and_doubles_nothing(asynchronous: NewTask) -> None:
    async def main() -> ScriptedWorld:
        task = asynchronous(max_staleness=1, enable_partial_rollout=True, over_sample_threshold=0.5)
        world = ScriptedWorld([task], engine=EngineScript(faults=EngineFaults(fails=0.1)))
        loop = await producing(world)
        for step in range(1, 20):
            await train(world, step)
            await world.sync_weights(step)
        await world.manager.shutdown()
        await loop
        return world

    world = run_virtual(main())
    world.findings().require_none()
    assert world.buffer.state_count("task", GroupState.TRAINED) == 19 * 4


@pytest.mark.long_tier
def test_memory_and_tasks_stay_flat_over_a_long_run(asynchronous: NewTask) -> None:
    async def main() -> list[tuple[int, int, int]]:
        task = asynchronous(max_staleness=1, tail_batch_trigger_size=2, over_sample_threshold=1.0)
        world = ScriptedWorld([task], engine=EngineScript(faults=EngineFaults(fails=0.05)))
        loop = await producing(world)
        seen = []
        for step in range(1, 301):
            result = await world.manager.get_batch(4, step)
            if not result.groups:
                await world.sync_weights(step - 1)
                result = await world.manager.get_batch(4, step)
            await world.manager.commit(step)
            await world.sync_weights(step)
            states = world.buffer.conservation("task").states
            waiting = sum(n for state, n in states.items() if state not in ("trained", "discarded"))
            runtime = world.manager.tasks["task"].runtime
            attempts = len(list(world.manager.tasks["task"].strategy.attempts()))
            seen.append((len(asyncio.all_tasks()), waiting, attempts + len(runtime.group_seconds)))
        await world.manager.shutdown()
        await loop
        return seen

    seen = run_virtual(main())
    early, late = seen[50:100], seen[250:]
    assert all(max(part[i] for part in late) <= max(part[i] for part in early) + 8 for i in range(3))


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


class Noted:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def notice(self, event: Event) -> None:
        self.events.append(event)


def test_progress_is_reported_per_task() -> None:
    noted = Noted()
    world = ScriptedWorld(observer=noted)
    run_virtual(world.manager.produce_batch(4, 1, model_step=0))
    told = [event for event in noted.events if isinstance(event, TaskProgress)]
    assert {event.task for event in told} == {"task"}
    assert max(event.done for event in told) >= 3
    assert {event.due for event in told} == {4}
    assert told[-1].tokens > 0


@pytest.mark.parametrize("disaggregated", [True, False])
def test_a_pause_is_told_as_it_begins_and_ends(asynchronous: NewTask, seconds: Seconds, disaggregated: bool) -> None:
    async def main() -> list[Event]:
        noted = Noted()
        world = ScriptedWorld([asynchronous()], engine=seconds(default=40, pause_s=4.0), observer=noted)
        if not disaggregated:
            await world.manager.produce_batch(4, 1, model_step=0)
            return noted.events
        loop = await producing(world)
        await asyncio.sleep(10)
        await world.manager.pause_produce()
        events = list(noted.events)
        await world.manager.shutdown()
        await loop
        return events

    told = [event for event in run_virtual(main()) if isinstance(event, StageBegan | StageEnded)]
    assert told == [StageBegan(stage="pause"), StageEnded(stage="pause", seconds=4.0)]


# Leases, resuming, ending.


@pytest.mark.parametrize("disaggregated", [True, False])
def test_a_batch_that_is_handed_out_is_not_handed_out_again(asynchronous: NewTask, disaggregated: bool) -> None:
    async def main() -> None:
        world = ScriptedWorld([asynchronous()])
        loop = await producing(world) if disaggregated else None

        async def ask() -> None:
            if disaggregated:
                await world.manager.get_batch(4, 1)
            else:
                await world.manager.produce_batch(4, 1, model_step=0)

        await ask()
        with pytest.raises(RunError, match="the batch of train step 1 is already handed out; commit or return it"):
            await ask()
        assert world.buffer.state_count("task", GroupState.LEASED) == 4
        await world.manager.return_batch(1)
        await ask()
        await world.manager.commit(1)
        await world.manager.shutdown()
        if loop is not None:
            await loop

    run_virtual(main())


def test_progress_is_one_object_also_when_colocated() -> None:
    async def main() -> tuple[bool, dict[str, int], int]:
        world = ScriptedWorld(batch_size=3)
        progress = world.manager.progress
        for step in (1, 2):
            await world.manager.produce_batch(3, step, model_step=step - 1)
            await world.manager.commit(step)
            await world.load_weights(step)
        return world.manager.progress is progress, progress.consumed_samples, progress.next_consumer_step

    assert run_virtual(main()) == (True, {"task": 6}, 3)


def test_the_first_step_after_a_resume_reports_only_its_own_discards_and_waste() -> None:
    def mostly(samples: list[RolloutState]) -> bool:
        return samples[0].draw % 2 == 0

    task = ScriptedTask(strategy=SyncProduceStrategyConfig(is_valid_sample_fn=mostly))

    async def main() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        world = ScriptedWorld([task])
        before = await world.manager.produce_batch(4, 1, model_step=0)
        await world.manager.commit(1)
        await world.load_weights(1)
        # The restored buffer knows of the discards before; a new manager begins from there.
        manager = AgentLoopManager(list(world.manager.tasks.values()), engine=world.engine, buffer=world.buffer)
        manager.resume(1, Restored(cursors={"task": 7}, trained={"task": 4}, returned={}))
        after = await manager.produce_batch(4, 2, model_step=1)
        return before.tasks["task"].discarded, after.tasks["task"].discarded, after.wasted_tokens

    before, after, wasted = run_virtual(main())
    assert before == {"filtered": 3}
    assert after == {"filtered": 4}
    assert set(wasted) == {"filtered"}


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
