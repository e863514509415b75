from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.produce import FailurePolicyConfig, ProduceBatchStatus, ProduceContext, SyncProduceStrategyConfig
from penstock.rollout import RolloutState, Status
from penstock.testing import EngineFaults, EngineScript, ScriptedEngine, ScriptedTask, ScriptedWorld, run_virtual

NewContext = Callable[..., ProduceContext]
Seconds = Callable[..., EngineScript]


async def produce(world: ScriptedWorld, ctx: ProduceContext) -> ProduceBatchStatus:
    return await world.manager.tasks["task"].strategy.produce_batch(ctx)


def pending(world: ScriptedWorld) -> int:
    return world.manager.tasks["task"].strategy.pending_task_count()


def odd_draws(samples: list[RolloutState]) -> bool:
    return samples[0].draw % 2 == 1


def test_it_returns_exactly_the_batch_and_leaves_nothing_pending(context: NewContext) -> None:
    world = ScriptedWorld()
    assert run_virtual(produce(world, context(world, size=4))) is ProduceBatchStatus.NORMAL
    assert (world.buffer.count("task", Status.COMPLETED), pending(world)) == (4, 0)
    assert world.buffer.conservation("task").drawn == 4


def test_what_is_complete_already_counts(context: NewContext) -> None:
    world = ScriptedWorld()
    run_virtual(produce(world, context(world, size=3)))
    run_virtual(produce(world, context(world, size=4)))
    assert world.buffer.conservation("task").drawn == 4


def test_it_refills_for_every_filtered_group(context: NewContext, seconds: Seconds) -> None:
    most = 0

    async def main(world: ScriptedWorld) -> float:
        nonlocal most
        ctx = context(world, size=2)
        producing = asyncio.create_task(produce(world, ctx))
        while not producing.done():
            await asyncio.sleep(0.5)
            most = max(most, ctx.running_count() + world.buffer.count("task", Status.COMPLETED))
        return asyncio.get_running_loop().time()

    strategy = SyncProduceStrategyConfig(is_valid_sample_fn=odd_draws)
    world = ScriptedWorld([ScriptedTask(strategy=strategy)], engine=seconds(default=3))
    run_virtual(main(world))
    assert (world.buffer.count("task", Status.COMPLETED), pending(world), most) == (2, 0, 2)
    assert world.buffer.discarded("task") == {"filtered": 2}


def test_it_refills_for_failed_groups(context: NewContext) -> None:
    task = ScriptedTask(failures=FailurePolicyConfig(infrastructure_retries=0))
    world = ScriptedWorld([task], engine=ScriptedEngine(EngineScript(faults=EngineFaults(fails=0.2)), seed=1))
    run_virtual(produce(world, context(world, size=8)))
    assert world.buffer.count("task", Status.COMPLETED) == 8
    assert world.buffer.discarded("task")["retries_exhausted"] > 0


def test_what_a_restart_gave_back_is_played_first_in_draw_order(context: NewContext) -> None:
    async def main() -> list[str]:
        world = ScriptedWorld([ScriptedTask(prompt_repeat_k=1)])
        ctx = context(world, size=3)
        groups = [await ctx.sample_group() for _ in range(3)]
        for group in reversed(groups):
            group[0].status = Status.ABORTED
            await ctx.put_generated_group(group)
        before = len(world.history.events)
        producing = asyncio.create_task(produce(world, ctx))
        await asyncio.sleep(0)
        started = [event.transition.group_id for event in world.history.events[before:]]
        await producing
        return started

    assert run_virtual(main()) == ["task:0", "task:1", "task:2"]


def test_a_pause_ends_it(context: NewContext) -> None:
    async def main() -> ProduceBatchStatus:
        world = ScriptedWorld()
        return await produce(world, context(world, aborted=True))

    assert run_virtual(main()) is ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT


def test_should_continue_gets_the_counts_of_this_call(context: NewContext, caplog: pytest.LogCaptureFixture) -> None:
    asked: set[int] = set()

    def always(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
        asked.add(batch_size)
        return True

    world = ScriptedWorld([ScriptedTask(strategy=SyncProduceStrategyConfig(should_continue_fn=always))])
    world.manager.progress.consumed_samples["task"] = 100
    assert run_virtual(produce(world, context(world, size=3))) is ProduceBatchStatus.NORMAL
    assert asked == {3}
    assert "asks for more than its batch of 3 groups" in caplog.text
