"""RayPlacement: the `Placement` port. What asks for actors lives in actors, the rest in this process.

An object in an actor gets proxies of its ports: to other actors directly, to what lives in this process by calls back.
What can be described travels as its description, and is built there: a tokenizer, whose members are no calls.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import ray

from penstock.cluster.host import pack_luggage
from penstock.cluster.launcher import CPUActorLauncher, Launch
from penstock.cluster.member import Member, Part
from penstock.cluster.proxies import (
    SERVERS,
    AgentLoopProxy,
    EngineProxy,
    JudgerProxy,
    ObserverProxy,
    TurnLogProxy,
)
from penstock.cluster.routers import PatientActor, Router, ToDriver
from penstock.cluster.wire import read_answer, unpack
from penstock.environment import named_environment
from penstock.errors import DeadlineExceeded, RunError
from penstock.judger.composed import ComposedJudger
from penstock.ports import Description, build_here
from penstock.resources import ActorsConfig, CPUResourcesConfig, Demand

BUILD_S = 300.0
"""For an object to be built in its actors: it may load a tokenizer."""


@runtime_checkable
class Described(Protocol):
    """A port whose members are no calls: it is built again wherever it is needed."""

    def description(self) -> Description: ...


class RayPlacement:
    def __init__(self, launcher: CPUActorLauncher) -> None:
        self._launcher = launcher
        self._homes: dict[str, Launch] = {}
        self._numbers = itertools.count(1)

    def begin(self, configs: Iterable[ActorsConfig]) -> None:
        """Start the actors that these ask for, and wait for none: what is placed in them later waits."""
        for config in configs:
            if config.num_ray_actors:
                self._launch(config.actors_home(), config.actors_demand(), config.actors_environment())

    def place(self, description: Description, ports: Mapping[str, Any]) -> Any:
        """Blocks until it is built in all its actors. Raises what building raises, and ConfigError without room."""
        if not description.num_actors:
            return build_here(description, ports)
        members = self._members(description)
        travelling = {name: self._travelling(name, ports[name]) for name in description.ports}
        part = Part(f"{description.name} {next(self._numbers)}", pack_luggage(description, travelling))
        facts = install(part, members)
        return _proxy(description.port, Attended(Router(part, members), self._launcher.attend), facts)

    def _members(self, description: Description) -> list[Member]:
        home = description.home or f"{description.name} {next(self._numbers)}"
        resources = CPUResourcesConfig(
            num_workers=description.num_actors,
            num_cpus_per_worker=description.num_cpus,
            cpu_memory_per_worker=description.memory,
        )
        return self._launch(home, resources.demand(description.name), description.environment).wait()

    def _launch(self, home: str, demand: Demand, environment: Sequence[str]) -> Launch:
        if home not in self._homes:
            same = sum(launch.demand.name == demand.name for launch in self._homes.values())
            name = f"{demand.name} ({same + 1})" if same else demand.name
            self._homes[home] = self._launcher.begin(name, demand, environment=named_environment(environment))
        return self._homes[home]

    def _travelling(self, name: str, port: Any) -> Any:
        """What an actor gets in place of a port of this process."""
        if port is None or isinstance(port, _PROXIES):
            return port
        if isinstance(port, Described):
            return Travelling(port.description())
        if isinstance(port, ComposedJudger):
            # Its routing is a look at the rollout: done where the rollout is, and each branch asked from there.
            return ComposedJudger({source: self._travelling(name, part) for source, part in port.parts.items()})
        if name not in SERVERS:
            return port
        identity = f"{name} {next(self._numbers)}"
        self._launcher.ports[identity] = SERVERS[name](port)
        return _back(name, ToDriver(identity), port)


def install(part: Part, members: Sequence[Member], timeout_s: float = BUILD_S) -> dict[str, Any]:
    """Build a part in all of these. Returns the plain data that its proxy needs. Raises what building raises."""
    refs = [member.handle.install.remote(part.id, part.luggage) for member in members]
    try:
        facts: list[dict[str, Any]] = [read_answer(answer) for answer in ray.get(refs, timeout=timeout_s)]
        return facts[0]
    except ray.exceptions.GetTimeoutError:
        raise DeadlineExceeded(f"{part.id} was not built in its actors within {timeout_s:g} s") from None
    except ray.exceptions.RayError as error:
        raise RunError(f"{part.id} could not be built in its actors: {str(error).strip().splitlines()[-1]}") from None


class Travelling:
    """A description that arrives as what it describes, built once in a process."""

    def __init__(self, description: Description) -> None:
        self._description = description

    def __reduce__(self) -> tuple[Any, ...]:
        return _built_once, (ray.cloudpickle.dumps(self._description),)


@functools.lru_cache(maxsize=16)
def _built_once(description: bytes) -> Any:
    return build_here(unpack(description), {})


class Attended:
    """A `Caller` of the driver: as soon as something is called, somebody hears what the actors call back."""

    def __init__(self, router: Router | PatientActor, attend: Callable[[], None]) -> None:
        self._router = router
        self._attend = attend

    def __reduce__(self) -> tuple[Any, ...]:
        return self._router.__reduce__()

    async def call(self, method: str, *arguments: Any) -> Any:
        self._attend()
        return await self._router.call(method, *arguments)

    async def control(self, method: str, *arguments: Any) -> list[Any]:
        self._attend()
        return await self._router.control(method, *arguments)

    def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        self._attend()
        return self._router.stream(method, *arguments)


_PROXIES = (AgentLoopProxy, JudgerProxy, EngineProxy, TurnLogProxy, ObserverProxy)


def _proxy(port: str, caller: Attended, facts: Mapping[str, Any]) -> Any:
    if port == "agent_loop":
        return AgentLoopProxy(caller)
    return JudgerProxy(caller, **facts) if port == "judger" else EngineProxy(caller)


def _back(name: str, caller: ToDriver, port: Any) -> Any:
    if name == "judger":
        return JudgerProxy(caller, relative=port.relative)
    return {"engine": EngineProxy, "turn_log": TurnLogProxy, "observer": ObserverProxy}[name](caller)
