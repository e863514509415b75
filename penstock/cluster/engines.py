"""The engines of a run as actors, seen from the driver, which makes them and the actor of their controller.

EngineActors   makes, restarts and ends engine actors, and knows what they must serve: the controller's actor asks
               it, also one that goes on for a dead one
RayEngines     the `Engines` port: all calls go to the controller's actor, which is waited for while it restarts
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from ray.util.placement_group import PlacementGroup

from penstock.cluster.door import EngineAddress, HomeProxy, Takeover, build_controller
from penstock.cluster.host import OBSERVER, pack_luggage
from penstock.cluster.launcher import CPUActorLauncher, Launch, restart
from penstock.cluster.member import ActorGone, Member, Part
from penstock.cluster.placement import Attended
from penstock.cluster.proxies import EngineProxy, EnginesProxy, ObserverProxy
from penstock.cluster.routers import PROBE_S, PatientActor, ToDriver
from penstock.engine.config import EnginesConfig, engine_name
from penstock.engine.health import Standing
from penstock.environment import child_environment
from penstock.errors import PenstockError, RunError
from penstock.ports import Description, LoadedWeights, WeightSource
from penstock.resources import CPUResourcesConfig, engines_demand
from penstock.trainer.site import RunContext
from penstock.weights.shared_memory import OwnSharedMemory
from penstock.weights.stored import StoredWeights

HOME = "engine actors"
"""The port of the driver that the controller's actor calls."""
CONTROLLER = "rollout-controller"
CONTROLLER_RESOURCES = CPUResourcesConfig(num_workers=1, num_cpus_per_worker=0.25)
ANSWER_S = 10.0
"""For an actor to answer what needs no work; one that does not is killed when it is to be restarted."""
CLOSE_S = 30.0

WriteAgain = Callable[[int], Awaitable[StoredWeights]]
"""The weights of this model step, where they can be read now."""


class _Engine:
    def __init__(self, address: EngineAddress, place: PlacementGroup | None) -> None:
        self.address = address
        self.place = place
        """That is given back with it; None where it is shared."""
        self.incarnation: str | None = None
        """Of the process that was given the model last."""


class EngineActors:
    """Starts as many as `config.num_engines`, in the bundles of `group` or each in a place of its own.

    Raises ConfigError when there is no room, with nothing left.
    """

    def __init__(
        self, launcher: CPUActorLauncher, run: RunContext, *, group: PlacementGroup | None = None, share: float = 1.0
    ) -> None:
        """`share` is what each takes of an accelerator that it has together with a train rank."""
        self.standing = Standing()
        """What the engines must serve, and how."""
        self.write_again: WriteAgain | None = None
        """Of whoever has the weights, if that is not this process."""
        self._launcher = launcher
        self._engines: dict[str, _Engine] = {}
        self._prepare(run, share)
        names = [engine_name(number) for number in range(run.config.engines.num_engines)]
        self._starting: Launch | None = self._begin(names, group)

    @property
    def addresses(self) -> list[EngineAddress]:
        return [engine.address for engine in self._engines.values()]

    def _prepare(self, run: RunContext, share: float) -> None:
        """What every engine's actor needs, also one that joins later."""
        from penstock.engine.hosted import build_hosted

        config, engine = run.config, run.config.engines.engine
        resources = config.resources.engines
        self._demand = msgspec.structs.replace(engines_demand(resources, 1), accelerators=share)
        self._python = engine.interpreter()
        threads = config.cpu_threads or max(1, math.floor(resources.num_cpus_per_worker))
        asked = child_environment(engine.environment)
        self._environment = {name: asked[name] for name in engine.environment if name in asked}
        self._environment["OMP_NUM_THREADS"] = str(threads)
        setup = engine.setup(str(run.model_dir), run.tokenizer, deterministic=config.deterministic, threads=threads)
        described = Description(name="engine", build=build_hosted, arguments={"setup": setup}, port="engine")
        self._luggage = pack_luggage(described, {})

    def wait(self) -> None:
        """Blocks until their processes are there. Raises ConfigError when one does not come; then none is left."""
        launch, self._starting = self._starting, None
        if launch is not None:
            self._note(launch)

    def _begin(self, names: Sequence[str], group: PlacementGroup | None) -> Launch:
        demand = msgspec.structs.replace(self._demand, num_workers=len(names))
        options: dict[str, Any] = {"environment": self._environment, "python": self._python}
        if group is not None:
            return self._launcher.begin(demand.name, demand, names=names, group=group, **options)
        return self._launcher.begin_apart(demand, names, **options)

    def _note(self, launch: Launch) -> None:
        for number, member in enumerate(launch.wait()):
            # Not healed in silence: a restarted engine has other weights, and serves only when the controller gave it
            # the published ones.
            part = Part(f"engine {member.name}", self._luggage, heals=False)
            place = launch.groups[number] if launch.groups else None
            self._engines[member.name] = _Engine(EngineAddress(member.name, member, part), place)

    # What the controller's actor asks.

    async def takeover(self) -> Takeover:
        """Nobody waits for what a dead controller asked of the engines."""
        running = [engine.address for engine in self._engines.values() if engine.incarnation is not None]
        await asyncio.gather(*map(_drop_all, running))
        return Takeover(self.addresses, self.standing)

    async def start(self, name: str) -> None:
        """It has its model when this returns. Raises what loading raises, ActorGone when it died."""
        engine = self._engine(name)
        identity = await engine.address.member.identify()
        if identity.incarnation != engine.incarnation:
            await engine.address.member.install(engine.address.part)
            engine.incarnation = identity.incarnation

    async def restart(self, name: str) -> None:
        """As `start`, in a new process. Ray starts one by itself when the old one died; one that hangs is killed."""
        engine = self._engine(name)
        await self._require_other_process(engine)
        await self.start(name)

    async def create(self, name: str) -> EngineAddress:
        """One more, wherever there is room. Raises ConfigError when there is none."""
        await asyncio.to_thread(lambda: self._note(self._begin([name], None)))
        self._launcher.attend()
        return self._engine(name).address

    async def end(self, name: str) -> None:
        engine = self._engines.pop(name, None)
        if engine is not None:
            await self._launcher.end(engine.address.member, group=engine.place)

    async def stored_again(self, model_step: int) -> StoredWeights | None:
        """Where these weights are, that an engine did not take; None: nobody else had them.

        Raises WeightSyncError or StateLost when those who had them have lost them.
        """
        if self.write_again is None:
            return None
        again = await self.write_again(model_step)
        if self.standing.model_step == model_step:
            self.standing = msgspec.structs.replace(self.standing, kept=again)
        return again

    async def end_all(self) -> None:
        await asyncio.gather(*map(self.end, list(self._engines)))

    def _engine(self, name: str) -> _Engine:
        if name not in self._engines:
            raise RunError(f"engine {name} has left")
        return self._engines[name]

    async def _require_other_process(self, engine: _Engine) -> None:
        """Waits until another one answers under its name; whoever called has a deadline."""
        member, clock = engine.address.member, asyncio.get_running_loop().time
        kill_at = clock()
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    identity = await member.identify()
                if identity.incarnation != engine.incarnation:
                    return
                lives = True
            except TimeoutError:
                lives = True
            except ActorGone:
                lives = False
            # Once, and again only when that had no effect: a second kill would meet the start of the next process.
            if lives and clock() >= kill_at:
                restart(member)
                kill_at = clock() + ANSWER_S
            await asyncio.sleep(PROBE_S)


class HomeServer:
    """Of `EngineActors`, for the controller's actor."""

    def __init__(self, actors: EngineActors) -> None:
        self.takeover = actors.takeover
        self.start = actors.start
        self.restart = actors.restart
        self.create = actors.create
        self.end = actors.end
        self.stored_again = actors.stored_again


class RayEngines(EnginesProxy):
    """Travels as a plain proxy of the controller's actor, so that others ask it without this process."""

    def __init__(self, launcher: CPUActorLauncher, actors: EngineActors, config: EnginesConfig) -> None:
        """Starts the controller's actor; blocks until all processes are there."""
        self._actors = actors
        self._launcher = launcher
        controller = launcher.begin(CONTROLLER, CONTROLLER_RESOURCES, names=[CONTROLLER])
        actors.wait()
        (self._member,) = controller.wait()
        launcher.ports[HOME] = HomeServer(actors)
        description = Description(
            name=CONTROLLER,
            build=build_controller,
            arguments={"config": config.controller, "max_running": config.engine.max_running},
            ports=("home", "observer"),
            port="engines",
        )
        ports = {"home": HomeProxy(ToDriver(HOME)), "observer": ObserverProxy(ToDriver(OBSERVER))}
        self._memory = OwnSharedMemory()
        self._door = PatientActor(Part(CONTROLLER, pack_luggage(description, ports)), self._member)
        super().__init__(Attended(self._door, launcher.attend))

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineProxy, (self._door,)

    @property
    def controller(self) -> Member:
        return self._member

    @property
    def addresses(self) -> list[EngineAddress]:
        """Where the engines live, to be looked at."""
        return self._actors.addresses

    def weights_are_at(self, write_again: WriteAgain) -> None:
        """Who is asked for published weights that are gone with the process that had them."""
        self._actors.write_again = write_again

    # What a controller that goes on for a dead one has to know is noted before it is asked for, or when it is done.

    async def pause_generation(self) -> None:
        self._stand(paused=True)
        await super().pause_generation()

    async def continue_generation(self) -> None:
        self._stand(paused=False, asleep=False)
        await super().continue_generation()

    async def sleep(self) -> None:
        await super().sleep()
        self._stand(asleep=True)

    async def wake(self) -> None:
        self._stand(asleep=False)
        await super().wake()

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights:
        """Stored weights are read by the engines where they are; others go through shared memory of this process."""
        if not isinstance(source, StoredWeights):
            return await self._memory.load(source, lambda stored: self._load_stored(stored, model_step))
        return await self._load_stored(source, model_step)

    async def _load_stored(self, stored: StoredWeights, model_step: int) -> LoadedWeights:
        loaded = await super().load_weights(stored, model_step)
        assert loaded is not None
        self._stand(model_step=model_step, kept=stored)
        return loaded

    async def close(self) -> None:
        """The controller, every engine, and their actors. Idempotent."""
        try:
            with contextlib.suppress(TimeoutError, PenstockError):
                async with asyncio.timeout(CLOSE_S):
                    await self._door.member.control(self._door.part, "close")
        finally:
            await self._memory.close()
            await self._actors.end_all()
            await self._launcher.end(self._member)

    def _stand(self, **changes: Any) -> None:
        self._actors.standing = msgspec.structs.replace(self._actors.standing, **changes)


async def _drop_all(address: EngineAddress) -> None:
    with contextlib.suppress(TimeoutError, PenstockError):
        async with asyncio.timeout(ANSWER_S):
            await address.member.control(address.part, "drop_all")
