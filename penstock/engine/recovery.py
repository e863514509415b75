"""Watches one engine while it is active and brings it back when it is not. One task per engine.

recover:  restart -> health check -> current weights -> pause and sleep like the others -> ACTIVE
watch:    a health check every few seconds; a failed series, or other weights than the published, fences; one that
          makes tokens and answers late is slow, not sick
"""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

from penstock.engine.health import DEAD, Fleet, Member
from penstock.engine.lifecycle import EngineState, Recover
from penstock.errors import InfrastructureFailure, RefusedError, StateLost, WeightSyncError
from penstock.ports import Engine
from penstock.weights.confirm import compare_checksums, load_confirmed


@runtime_checkable
class Restartable(Protocol):
    async def restart(self) -> None: ...


async def supervise(member: Member, fleet: Fleet) -> None:
    """Runs until cancelled, or until the engine refuses to start for good."""
    while fleet.state(member) is not EngineState.GONE:
        recovery, member.recovery = member.recovery, None
        if recovery is not None:
            await _recover(member, fleet, recovery)
        else:
            await _watch(member, fleet)


class _LacksWeights(Exception):
    def __init__(self, served: int) -> None:
        self.served = served


async def _recover(member: Member, fleet: Fleet, recovery: Recover) -> None:
    if recovery.after_s:
        await asyncio.sleep(recovery.after_s)
    try:
        async with asyncio.timeout(fleet.config.start_timeout_s):
            await _bring_back(member, fleet, restart=recovery.restart)
    except RefusedError as refused:
        fleet.refused(member, str(refused))
    except _LacksWeights as lacks:
        # Alive and idle: a restart would only bring back older weights.
        fleet.lacks_weights(member, lacks.served)
    except TimeoutError:
        fleet.recovery_failed(member, f"did not come back within {fleet.config.start_timeout_s:g} s")
    except Exception as error:  # whatever it is, the engine does not serve and its story says why
        fleet.recovery_failed(member, f"{type(error).__name__}: {error}")


async def _bring_back(member: Member, fleet: Fleet, *, restart: bool) -> None:
    engine = member.engine
    restart = restart and isinstance(engine, Restartable)
    fleet.recovering(member, restarted=restart)
    if restart:
        assert isinstance(engine, Restartable)
        member.forget_process()
        await engine.restart()
    await fleet.load_ended.wait()
    await engine.check_health()
    served = await _bring_to_published(member, fleet)
    await _take_mode(engine, fleet)
    # Nothing is awaited from here on: what holds now holds when it serves.
    fleet.recovered(member, served)


async def _bring_to_published(member: Member, fleet: Fleet) -> int:
    """What it serves then."""
    while True:
        served = await member.engine.model_step()
        published, kept = fleet.published, fleet.kept
        if served == published and not fleet.life.is_doubtful(member.name):
            return served
        if kept is None:
            raise _LacksWeights(served)
        try:
            loaded = await load_confirmed(member.engine, kept, published)
        except StateLost:
            raise _LacksWeights(served) from None  # the trainer has none to give either
        except WeightSyncError:
            if not fleet.sync_waits:
                raise
            raise _LacksWeights(served) from None  # they may be gone, and newer ones are here
        if loaded.checksum is not None:
            compare_checksums(published, kept.checksum, loaded.checksum)
        fleet.life.loaded(member.name)


async def _take_mode(engine: Engine, fleet: Fleet) -> None:
    """Paused and asleep, or not, like the others. The mode may change while the engine takes it."""
    taken: tuple[bool, bool] | None = None
    while taken != (mode := (fleet.paused and not fleet.draining, fleet.asleep)):
        taken = mode
        paused, asleep = mode
        if not paused:
            await engine.continue_generation()
        else:
            await engine.pause_generation()
            await (engine.sleep() if asleep else engine.wake())


async def _watch(member: Member, fleet: Fleet) -> None:
    """One health check, when it is time or when somebody asks for it."""
    config = fleet.config
    suspect = fleet.life.is_suspect(member.name)
    try:
        async with asyncio.timeout(config.probe_retry_s if suspect else config.probe_interval_s):
            await member.attention.wait()
    except TimeoutError:
        pass
    member.attention.clear()
    if fleet.state(member) is not EngineState.ACTIVE:
        return
    tokens_before = member.tokens_seen
    try:
        async with asyncio.timeout(config.probe_timeout_s):
            await _probe(member, fleet)
    except TimeoutError:
        if member.tokens_seen > tokens_before:
            return  # it makes tokens, so it lives: its steps are long on a busy machine
        fleet.probe_failed(member, f"no answer to a health check within {config.probe_timeout_s:g} s")
    except InfrastructureFailure as failure:
        fleet.probe_failed(member, f"{type(failure).__name__}: {failure}", dead=failure.reason in DEAD)
    except Exception as error:  # an engine that cannot say how it is may not be well
        fleet.probe_failed(member, f"{type(error).__name__}: {error}")


async def _probe(member: Member, fleet: Fleet) -> None:
    member.stats = await member.engine.stats()
    member.tokens_seen = member.stats.generated_tokens
    await member.engine.check_health()
    published = fleet.published
    served = await member.engine.model_step()
    fleet.probe_answered(member, served, published)
    fleet.tell_load(member, served)
