"""Strategies that users write: with the public methods of the context, or on top of PooledStrategy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import RolloutControllerConfig
from penstock.errors import DeadlineExceeded
from penstock.produce import (
    PooledStrategy,
    PooledStrategyConfig,
    ProduceBatchStatus,
    ProduceContext,
    ProduceStrategy,
    ProduceStrategyConfig,
)
from penstock.rollout import Group, Status
from penstock.testing import EngineFaults, EngineScript, ScriptedTask, ScriptedWorld, run_virtual

NORMAL = ProduceBatchStatus.NORMAL


class Plain(ProduceStrategy):
    """Until the target is reached, one after the other."""

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        while ctx.available_count() < ctx.target_abs:
            if ctx.should_abort():
                return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            await ctx.put_generated_group(self.handed_on(await ctx.generate_group(await ctx.sample_group())))
        return NORMAL

    def handed_on(self, group: Group) -> Group:
        return group


class Rebuilt(Plain):
    def handed_on(self, group: Group) -> Group:
        return [*group]


class PlainConfig(ProduceStrategyConfig):
    rebuilt: bool = False

    def build(self, *, sync_weights_interval: int = 1) -> ProduceStrategy:
        return Rebuilt() if self.rebuilt else Plain()


class OneByOne(PooledStrategy):
    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        while ctx.available_count() < ctx.target_abs and not ctx.should_abort():
            await self.start_groups(ctx, 1, [Status.ABORTED])
            await self.wait_for_change(ctx)
            await self.store_finished(ctx)
        return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT if ctx.should_abort() else NORMAL


class OneByOneConfig(PooledStrategyConfig):
    def build(self, *, sync_weights_interval: int = 1) -> ProduceStrategy:
        return OneByOne(pause_timeout_s=self.pause_timeout_s)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_group_may_be_handed_on_as_it_came_or_as_a_list_of_its_own(rebuilt: bool) -> None:
    world = ScriptedWorld([ScriptedTask(strategy=PlainConfig(rebuilt=rebuilt))])
    result = run_virtual(world.manager.produce_batch(4, 1, model_step=0))
    mine = result.tasks["task"]
    assert len(result.groups) == 4
    assert (mine.produced_rollouts, mine.raw_reward_count, mine.group_time_count) == (8, 8, 4)
    assert mine.produced_tokens == sum(rollout.num_tokens for group in result.groups for rollout in group)


def documented() -> ProduceStrategyConfig:
    document = (Path(__file__).parents[3] / "docs" / "concepts.md").read_text()
    found: dict[str, Any] = {"__name__": "a_strategy_of_your_own"}
    exec(document.partition("## A strategy of your own")[2].partition("```python\n")[2].partition("```")[0], found)
    config: ProduceStrategyConfig = found["OneByOneConfig"]()
    return config


@pytest.mark.parametrize("strategy", [PlainConfig(), OneByOneConfig(), documented()])
def test_a_strategy_that_never_calls_its_model_too_old_is_bounded_all_the_same(
    strategy: ProduceStrategyConfig,
) -> None:
    async def main() -> tuple[int, int]:
        world = ScriptedWorld([ScriptedTask(strategy=strategy)], sync_weights_interval=2)
        loop = asyncio.create_task(world.manager.produce_loop(4))
        await world.manager.continue_produce(0)
        await asyncio.sleep(10_000)
        world.check_bound()
        ahead = world.buffer.count("task", Status.COMPLETED)
        await world.manager.get_batch(4, 1)
        await world.manager.commit(1)
        await world.sync_weights(1)
        await asyncio.sleep(10_000)
        world.check_bound()
        later = world.buffer.count("task", Status.COMPLETED)
        await world.manager.shutdown()
        await loop
        return ahead, later

    # Weights 0 may serve steps 1 and 2; weights 1 steps 2 and 3.
    assert run_virtual(main()) == (8, 8)


def test_a_stalled_run_names_the_rollouts_of_a_strategy_that_keeps_no_attempts() -> None:
    engine = EngineScript(faults=EngineFaults(hangs=1.0))
    patient = RolloutControllerConfig(request_timeout_s=1e6)
    world = ScriptedWorld(
        [ScriptedTask(strategy=PlainConfig())], engine=engine, controller=patient, stall_timeout_s=100.0
    )
    with pytest.raises(DeadlineExceeded, match=r"Being played: task:0:0 in engine, task:0:1 in engine\."):
        run_virtual(world.manager.produce_batch(4, 1, model_step=0))
