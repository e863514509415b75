"""Watches one engine while it is active and brings it back when it is not. One task per engine.

recover:  restart -> health check -> current weights -> pause and sleep like the others -> ACTIVE
watch:    a health check every few seconds; a failed series, or other weights than the published, fences; one that
          makes tokens and answers late is slow, not sick
"""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

from penstock.engine.health import DEAD, EngineState, Fleet, Member
from penstock.errors import InfrastructureFailure, RefusedError
from penstock.ports import Engine, PauseMode
from penstock.weights.confirm import compare_checksums, load_confirmed


@runtime_checkable
class Restartable(Protocol):
    async def restart(self) -> None: ...


async def supervise(member: Member, fleet: Fleet) -> None:
    """Runs until cancelled, or until the engine refuses to start for good."""
    restart = False
    while True:
        try:
            await _recover(member, fleet, restart=restart)
            await _watch(member, fleet)
            restart = True
        except RefusedError as refused:
            fleet.retire(member, str(refused))
            return
        except _AwaitsWeights:
            # Alive and idle: a restart would only bring back older weights.
            restart = False
            await fleet.next_sync.wait()
        except TimeoutError:
            fleet.stays_fenced(member, f"did not come back within {fleet.config.start_timeout_s:g} s")
            restart = True
            await asyncio.sleep(fleet.config.recovery_retry_s)
        except Exception as error:  # whatever it is, the engine does not serve and its story says why
            fleet.stays_fenced(member, _story(error))
            restart = True
            await asyncio.sleep(fleet.config.recovery_retry_s)


class _AwaitsWeights(Exception):
    pass


async def _recover(member: Member, fleet: Fleet, *, restart: bool) -> None:
    member.state = EngineState.RECOVERING
    engine = member.engine
    async with asyncio.timeout(fleet.config.start_timeout_s):
        if restart and isinstance(engine, Restartable):
            member.forget_process()
            await engine.restart()
        while True:
            await fleet.load_ended.wait()
            await engine.check_health()
            await _bring_to_published(member, fleet)
            await _take_mode(engine, fleet)
            # Nothing is awaited from here on: what holds now holds when it serves.
            if fleet.loading_step is None and not member.awaits_weights:
                fleet.activate(member)
                return


async def _bring_to_published(member: Member, fleet: Fleet) -> None:
    while True:
        served = await member.engine.model_step()
        published, kept = fleet.published, fleet.kept
        if served == published and not member.doubtful:
            member.awaits_weights = False
            return
        if kept is None:
            fleet.lacks_weights(member, served)
            raise _AwaitsWeights
        loaded = await load_confirmed(member.engine, kept, published)
        if loaded.checksum is not None:
            compare_checksums(published, kept.checksum, loaded.checksum)
        member.doubtful = False


async def _take_mode(engine: Engine, fleet: Fleet) -> None:
    """Paused and asleep, or not, like the others. The mode may change while the engine takes it."""
    taken: tuple[PauseMode | None, bool] | None = None
    while taken != (fleet.pause, fleet.asleep):
        taken = (fleet.pause, fleet.asleep)
        if fleet.pause is None:
            await engine.continue_generation()
        else:
            await engine.pause_generation(fleet.pause)
            await (engine.sleep() if fleet.asleep else engine.wake())


async def _watch(member: Member, fleet: Fleet) -> None:
    """Returns when the engine is fenced, by its probes or by others."""
    config = fleet.config
    while True:
        try:
            async with asyncio.timeout(config.probe_retry_s if member.probe_failures else config.probe_interval_s):
                await member.attention.wait()
        except TimeoutError:
            pass
        member.attention.clear()
        if not fleet.is_active(member):
            return
        if member.loading:
            continue
        tokens_before = member.tokens_seen
        try:
            async with asyncio.timeout(config.probe_timeout_s):
                await _probe(member, fleet)
        except TimeoutError:
            if member.tokens_seen > tokens_before:
                continue  # it makes tokens, so it lives: its steps are long on a busy machine
            _probe_failed(member, fleet, f"no answer to a health check within {config.probe_timeout_s:g} s")
        except InfrastructureFailure as failure:
            _probe_failed(member, fleet, _story(failure), dead=failure.reason in DEAD)
        else:
            member.probe_failures = 0


def _probe_failed(member: Member, fleet: Fleet, failure: str, *, dead: bool = False) -> None:
    if member.loading:  # it answers when it has its weights; loading has its own deadline
        return
    member.probe_failures += 1
    member.last_failure = failure
    if member.probe_failures >= fleet.config.failures_to_fence or dead:
        fleet.fence(member, failure)


async def _probe(member: Member, fleet: Fleet) -> None:
    before = fleet.published
    member.stats = await member.engine.stats()
    member.tokens_seen = member.stats.generated_tokens
    await member.engine.check_health()
    served = await member.engine.model_step()
    if served != fleet.published and before == fleet.published and not member.loading:
        fleet.fence(member, f"serves model step {served}; published is {fleet.published}")


def _story(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
