"""Groups of agents outside, which cannot be cut off and played again: they go on over a pause."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.agent_loop import AgentLoop
from penstock.produce import AsyncProduceStrategyConfig, SyncProduceStrategyConfig
from penstock.replay import GroupState
from penstock.rollout import RolloutState, Status
from penstock.testing import EngineScript, ScriptedTask, ScriptedWorld, constant, run_virtual


class Outside(AgentLoop):
    """Two turns of ten seconds each; whoever asks knows nothing of pauses."""

    replayable = False

    def __init__(self, **rest: Any) -> None:
        super().__init__(**{**rest, "on_pause": "keep"})

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        await self.generate(rollout)
        await self.call_tool(rollout, self._tool, timeout_s=100.0)
        await self.generate(rollout)
        return rollout

    async def _tool(self) -> str:
        await asyncio.sleep(1)
        return "[4]"


def world_of(loop: type[AgentLoop] = Outside, **options: Any) -> ScriptedWorld:
    strategy = options.pop("strategy", None) or AsyncProduceStrategyConfig(max_staleness=2)
    task = ScriptedTask(name="task", loop=loop, strategy=strategy)
    script = EngineScript(tokens_per_s=1.0, length=constant(10))
    return ScriptedWorld([task], engine=script, batch_size=2, **options)


async def producing(world: ScriptedWorld) -> asyncio.Task[None]:
    task = asyncio.create_task(world.manager.produce_loop(world.batch_size))
    await world.manager.continue_produce(0)
    return task


def test_a_weight_sync_in_the_middle_of_a_request_is_invisible_to_an_agent_outside() -> None:
    async def main() -> None:
        world = world_of()
        loop = await producing(world)
        await asyncio.sleep(4)  # in the first answer
        await world.sync_weights(1)
        assert world.buffer.state_count("task", GroupState.RUNNING) > 0
        result = await world.manager.get_batch(2, 1)
        for group in result.groups:
            for rollout in group:
                assert rollout.status is Status.COMPLETED
                assert rollout.response.steps[0][0] == 0 and rollout.response.steps[-1][0] == 1
                assert [turn.kind for turn in rollout.turns] == ["generate", "tool", "generate"]
        # Nothing was aborted, so nothing was generated again.
        assert sum(world.buffer.tokens.wasted.values()) == 0
        assert set(world.engines[0].served.values()) == {2}
        await world.manager.commit(1)
        await world.manager.shutdown()
        await loop
        world.check()

    run_virtual(main())


def test_a_pause_does_not_wait_for_an_agent_outside() -> None:
    async def main() -> None:
        world = world_of()
        loop = await producing(world)
        await asyncio.sleep(4)
        started = asyncio.get_running_loop().time()
        await world.manager.pause_produce()
        assert asyncio.get_running_loop().time() - started < 1
        running = world.buffer.state_count("task", GroupState.RUNNING)
        assert running > 0
        await asyncio.sleep(500)  # frozen, however long that takes
        assert world.buffer.state_count("task", GroupState.RUNNING) == running
        await world.manager.continue_produce(0)
        assert len((await world.manager.get_batch(2, 1)).groups) == 2
        await world.manager.commit(1)
        await world.manager.shutdown()
        await loop

    run_virtual(main())


def test_what_is_at_work_when_the_run_ends_is_stored_with_its_finished_turns() -> None:
    async def main() -> None:
        world = world_of()
        loop = await producing(world)
        await asyncio.sleep(15)  # in the second answer
        await world.manager.shutdown()
        await loop
        assert world.buffer.state_count("task", GroupState.RUNNING) == 0
        assert world.buffer.count("task", Status.ABORTED) > 0
        (group,) = world.buffer.get(1, "task", Status.ABORTED)
        assert [turn.kind for turn in group[0].turns] == ["generate", "tool"]
        await world.engine.close()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_a_colocated_run_takes_groups_over_its_train_steps() -> None:
    """Over-sampled groups go on while the trainer trains; kept requests end before the engine sleeps."""

    async def main() -> None:
        strategy = AsyncProduceStrategyConfig(max_staleness=2, over_sample_threshold=1.0)
        world = world_of(strategy=strategy)
        for step in (1, 2, 3):
            result = await world.manager.produce_batch(2, step, model_step=step - 1)
            assert len(result.groups) == 2
            await world.engine.sleep()
            await world.manager.commit(step)
            await world.engine.wake()
            await world.load_weights(step)
        assert sum(world.buffer.tokens.wasted.values()) == 0
        await world.close()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_a_task_without_partial_rollout_keeps_the_finished_turns_of_an_agent_outside() -> None:
    async def main() -> None:
        world = world_of(strategy=SyncProduceStrategyConfig())
        producing = asyncio.create_task(world.manager.produce_batch(2, 1, model_step=0))
        await asyncio.sleep(15)
        producing.cancel()
        await asyncio.wait([producing])
        (group,) = world.buffer.get(1, "task", Status.ABORTED)
        assert [turn.kind for turn in group[0].turns] == ["generate", "tool"]

    run_virtual(main())
