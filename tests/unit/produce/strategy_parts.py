"""A world's only strategy: what it has in hand, and pauses as the manager makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.produce import ProduceBatchStatus, ProduceContext
from penstock.produce.strategy import ProduceStrategy
from penstock.replay import GroupState
from penstock.testing import EngineScript, ScriptedTask, ScriptedWorld

NORMAL = ProduceBatchStatus.NORMAL
ABORT = ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
EXPIRED = ProduceBatchStatus.EXPIRED_BATCH

Seconds = Callable[..., EngineScript]
NewTask = Callable[..., ScriptedTask]
NewContext = Callable[..., ProduceContext]


def strategy_of(world: ScriptedWorld) -> ProduceStrategy:
    return world.manager.tasks["task"].strategy


def running(world: ScriptedWorld) -> int:
    return world.buffer.state_count("task", GroupState.RUNNING)


def drawn(world: ScriptedWorld) -> int:
    return world.buffer.conservation("task").drawn


async def pause(world: ScriptedWorld, ctx: ProduceContext) -> float:
    """As the manager does it: the signal, the engines, the drain."""
    ctx.update_event.set()
    ctx.changed.notify()
    await world.engine.pause_generation()
    spent = await strategy_of(world).pause_produce(ctx)
    await world.engine.continue_generation()
    ctx.update_event.clear()
    return spent


async def interrupt(world: ScriptedWorld, context: NewContext, *, due: int = 1) -> None:
    """Produce for three seconds, then pause."""
    ctx = context(world, due=due, size=due)
    producing = asyncio.create_task(strategy_of(world).produce_batch(ctx))
    await asyncio.sleep(3)
    await pause(world, ctx)
    await producing


async def now() -> float:
    return asyncio.get_running_loop().time()
