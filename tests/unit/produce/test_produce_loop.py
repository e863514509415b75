"""A producer beside the trainer: how far it runs ahead, what it makes up for, and that nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from penstock.errors import RunError
from penstock.produce import (
    AgentLoopManagerStatus,
    ProduceBatchStatus,
    ProduceContext,
    ProduceStrategy,
    ProduceStrategyConfig,
)
from penstock.replay import GroupState
from penstock.rollout import Status
from penstock.testing import EngineFaults, EngineScript, ScriptedTask, ScriptedWorld, run_virtual

from .manager_parts import EXPIRED, NewTask, Seconds, by_task, ids, now, producing, train


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


# What is missing is made up for.


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


# Whole runs.


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
    kept: list[int] = []

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
            await world.buffer.prune(step)
            await world.sync_weights(step)
            states = world.buffer.conservation("task").states
            waiting = sum(n for state, n in states.items() if state not in ("trained", "discarded"))
            runtime = world.manager.tasks["task"].runtime
            attempts = len(list(world.manager.tasks["task"].strategy.attempts()))
            seen.append((len(asyncio.all_tasks()), waiting, attempts + len(runtime.group_seconds)))
            if step in (100, 200, 300):
                # What the tools of this test write down is not the producer's.
                world.history.events.clear()
                for engine in world.engines:
                    engine.served.clear()
                world.judgers["task"].judged.clear()
                gc.collect()
                kept.append(tracemalloc.get_traced_memory()[0])
        await world.manager.shutdown()
        await loop
        return seen

    tracemalloc.start()
    try:
        seen = run_virtual(main())
    finally:
        tracemalloc.stop()
    early, late = seen[50:100], seen[250:]
    assert all(max(part[i] for part in late) <= max(part[i] for part in early) + 8 for i in range(3))
    # Of 400 groups in 100 steps: the router remembers where the last 4,096 groups were answered, and that is all.
    assert kept[2] - kept[1] < 400 * 500
