"""The batches that a manager hands out: exact, leased once, and told of."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.errors import RunError
from penstock.events import Event, StageBegan, StageEnded, TaskProgress
from penstock.produce import (
    AgentLoopManager,
    ProduceBatchStatus,
    ProduceContext,
    ProduceStrategy,
    ProduceStrategyConfig,
    SyncProduceStrategyConfig,
)
from penstock.replay import GroupState, Restored
from penstock.rollout import RolloutState, Status
from penstock.testing import ScriptedTask, ScriptedWorld, run_virtual

from .manager_parts import NORMAL, NewTask, Seconds, by_task, ids, now, producing

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


# Batch sizes, results, events.


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


# Leases and resuming.


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


@pytest.mark.parametrize("same_tasks", [True, False])
def test_a_resume_has_the_windows_of_the_checkpoint_and_the_counts_of_the_ledger(same_tasks: bool) -> None:
    manager = ScriptedWorld([ScriptedTask(name="task")]).manager
    before = ScriptedWorld([ScriptedTask(name="task" if same_tasks else "another")]).manager.progress
    (window,) = before.windows.values()
    window.produced_rollouts, window.produced_tokens = 8, 80
    before.consumed_samples = dict.fromkeys(before.consumed_samples, 5)
    manager.resume(2, Restored(cursors={"task": 7}, trained={"task": 4}, returned={}), before.state_dict())
    assert manager.progress.consumed_samples == {"task": 4}
    assert manager.progress.windows["task"].produced_tokens == (80 if same_tasks else 0)


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
