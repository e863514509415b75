"""A manager's scripted world: its producer at work beside a consumer that trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.ports import GenerateRequest
from penstock.produce import ProduceBatchStatus
from penstock.rollout import Group
from penstock.testing import EngineScript, ScriptedTask, ScriptedWorld

Seconds = Callable[..., EngineScript]
NewTask = Callable[..., ScriptedTask]

EXPIRED = ProduceBatchStatus.EXPIRED_BATCH
NORMAL = ProduceBatchStatus.NORMAL


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
