"""What an engine that fails does to a run: nothing of it reaches a batch, and the run goes on with the others."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from penstock.engine import RolloutControllerConfig
from penstock.produce import AsyncProduceStrategyConfig, ProduceBatchResult
from penstock.rollout import Status
from penstock.testing import EngineFaults, EngineScript, ScriptedEngine, ScriptedTask, ScriptedWorld, run_virtual

BATCH, STEPS = 8, 6


class Forgetful(ScriptedEngine):
    """Says that it took new weights and still has those of the beginning."""

    async def load_weights(self, source: Any, model_step: int) -> None:
        pass


def bad_engine(fault: str) -> ScriptedEngine:
    if fault == "keeps old weights":
        return Forgetful()
    return ScriptedEngine(EngineScript(faults=EngineFaults(**{fault: 1.0})), seed=1)


def require_true(result: ProduceBatchResult, train_step: int) -> None:
    assert len(result.groups) == BATCH
    for rollout in (rollout for group in result.groups for rollout in group):
        tokens = rollout.response
        assert rollout.status is Status.COMPLETED and rollout.error is None
        assert len(tokens) == len(tokens.ids) // 4 == len(tokens.logprobs) // 4 > 0
        assert np.isfinite(np.frombuffer(tokens.logprobs, np.float32)).all()
        assert all(train_step - 2 <= step <= train_step - 1 for step, _ in tokens.steps)


async def train(world: ScriptedWorld) -> None:
    manager = world.manager
    producer = asyncio.create_task(manager.produce_loop(BATCH))
    await manager.continue_produce(0)
    step = 1
    while step <= STEPS:
        result = await manager.get_batch(BATCH, step)
        if not result.groups:
            await world.sync_weights(step - 1)
            continue
        require_true(result, step)
        world.history.consumed(step, result.groups, trained=True)
        await manager.commit(step)
        await world.sync_weights(step)
        step += 1
    await manager.shutdown()
    await producer
    world.check()
    world.findings().require_none()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", ["fails", "hangs", "nonsense", "wrong_version", "keeps old weights"])
def test_nothing_of_a_bad_engine_reaches_a_batch_and_the_run_goes_on_with_the_good_one(fault: str, seed: int) -> None:
    engines = {"good": ScriptedEngine(seed=seed), "bad": bad_engine(fault)}

    async def main() -> None:
        controller = RolloutControllerConfig(request_timeout_s=30.0).build(engines)
        task = ScriptedTask(strategy=AsyncProduceStrategyConfig(enable_partial_rollout=True, max_staleness=1))
        try:
            await train(ScriptedWorld([task], batch_size=BATCH, engine=controller, seed=seed))
        finally:
            await controller.close()

    run_virtual(main(), seed=seed, deadline=100_000.0)
    assert engines["bad"].served
