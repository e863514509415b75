"""In the actor of the rollout controller: engines that live in other actors, and the driver that starts them.

    agent loop (actor) ---> RolloutController (actor) ---> engine (actor)          tokens
                                  |        ^
                                  v        |
                             EngineActors (driver)             start, restart, one more, one less; what is published

The controller is the one of `penstock.engine`; an engine that is an actor is restarted by the driver, which made it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from penstock.cluster import host
from penstock.cluster.member import ActorGone, Member, Part
from penstock.cluster.proxies import Caller, EngineProxy
from penstock.cluster.routers import OneActor
from penstock.engine.config import RolloutControllerConfig
from penstock.engine.controller import RolloutController
from penstock.engine.health import Standing
from penstock.errors import InfrastructureFailure, WeightSyncError
from penstock.events import Observer
from penstock.ports import LoadedWeights, WeightSource
from penstock.rollout import FailureReason
from penstock.weights.shared_memory import OwnSharedMemory
from penstock.weights.stored import StoredWeights


class EngineAddress(msgspec.Struct, frozen=True):
    """Where an engine lives."""

    name: str
    member: Member
    part: Part


class Takeover(msgspec.Struct, frozen=True):
    """What a controller finds when it begins: the first one, or one that goes on for a dead one."""

    engines: list[EngineAddress]
    standing: Standing


class HomeProxy:
    """The driver's `EngineActors`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def takeover(self) -> Takeover:
        found: Takeover = await self._caller.call("takeover")
        return found

    async def start(self, name: str) -> None:
        await self._caller.call("start", name)

    async def restart(self, name: str) -> None:
        await self._caller.call("restart", name)

    async def create(self, name: str) -> EngineAddress:
        address: EngineAddress = await self._caller.call("create", name)
        return address

    async def end(self, name: str) -> None:
        await self._caller.call("end", name)

    async def stored_again(self, model_step: int) -> StoredWeights | None:
        again: StoredWeights | None = await self._caller.call("stored_again", model_step)
        return again


class ActorEngine(EngineProxy):
    """An engine in an actor. Like one in a process of its own, it loads its model with the first call."""

    def __init__(self, address: EngineAddress, home: HomeProxy) -> None:
        super().__init__(_EngineCaller(address.part, address.member))
        self.name = address.name
        self._home = home
        self._memory = OwnSharedMemory()

    async def check_health(self) -> None:
        """Also starts it."""
        await self._home.start(self.name)
        await super().check_health()

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights | None:
        """Stored weights are read by the engine where they are; any others go through shared memory of this process.

        Where stored ones are gone with whoever had them, the driver knows where else they are.
        """
        if not isinstance(source, StoredWeights):
            return await self._memory.load(source, lambda stored: self._load_stored(stored, model_step))
        try:
            return await super().load_weights(source, model_step)
        except WeightSyncError:
            again = await self._home.stored_again(model_step)
            if again is None or again == source:
                raise
            return await super().load_weights(again, model_step)

    async def restart(self) -> None:
        """It has its model when this returns, the weights of its directory, and nothing to do."""
        await self._home.restart(self.name)

    async def close(self) -> None:
        await self._memory.close()
        await self._home.end(self.name)

    async def _load_stored(self, stored: StoredWeights, model_step: int) -> LoadedWeights:
        loaded = await super().load_weights(stored, model_step)
        assert loaded is not None
        return loaded


class _EngineCaller(OneActor):
    """For whoever asks the controller, a lost actor is an engine that died."""

    async def call(self, method: str, *arguments: Any) -> Any:
        try:
            return await super().call(method, *arguments)
        except ActorGone as gone:
            raise _died(gone) from None

    async def control(self, method: str, *arguments: Any) -> list[Any]:
        try:
            return await super().control(method, *arguments)
        except ActorGone as gone:
            raise _died(gone) from None

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        try:
            async for piece in super().stream(method, *arguments):
                yield piece
        except ActorGone as gone:
            raise _died(gone) from None


def build_controller(
    *, config: RolloutControllerConfig, max_running: int, home: HomeProxy, observer: Observer
) -> RolloutController:
    """Blocks until the driver has said which engines there are and what they must serve."""
    found = host.call_from_thread(home.takeover())

    async def new_engine(name: str) -> ActorEngine:
        return ActorEngine(await home.create(name), home)

    return config.build(
        {address.name: ActorEngine(address, home) for address in found.engines},
        standing=found.standing,
        max_running=max_running,
        observer=observer,
        new_engine=new_engine,
    )


def _died(gone: ActorGone) -> InfrastructureFailure:
    return InfrastructureFailure(str(gone), reason=FailureReason.ENGINE_DIED)
