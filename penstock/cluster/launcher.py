"""CPUActorLauncher: starts actors that take CPUs and memory, and keeps them.

Each actor stands in a bundle of a placement group: one of its own, or one that the caller made and ends. Or free, where
Ray finds room. Every wait is bounded; when something does not fit, what was started is ended again, and the error says
what is missing on which node.

Ray itself starts a dead actor again, on the same node or another, as the same actor: handles stay good in every
process. The launcher sees to it that somebody is told: an `Attendant` for each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.cluster.backcalls import Attendant
from penstock.cluster.host import OBSERVER, RemoteHost
from penstock.cluster.member import Member
from penstock.cluster.proxies import ObserverServer
from penstock.cluster.resources import CPUResourceManager, bundle_of
from penstock.cluster.session import Session
from penstock.errors import ConfigError
from penstock.events import Nobody, Observer
from penstock.resources import AcceleratorResourcesConfig, CPUResourcesConfig, Demand

GROUP_S = 10.0
"""For a placement group to be made, once it is known to fit."""
START_S = 120.0
"""For an actor's process to start. On a busy machine Python and its imports take a while."""

FREE = "free"
"""In place of a placement group: wherever there is room."""


class Launch:
    """Actors that are on their way."""

    def __init__(self, launcher: CPUActorLauncher, demand: Demand) -> None:
        self.demand = demand
        self.members: list[Member] = []
        self.groups: list[PlacementGroup] = []
        """Of their own."""
        self._launcher = launcher
        self._there = False

    def wait(self) -> list[Member]:
        """Blocks until all of them answer. Raises ConfigError when one does not; then none is left."""
        if not self._there:
            try:
                self._launcher.finish(self)
            except BaseException:
                self._launcher.undo(self)
                raise
            self._there = True
        return self.members


class CPUActorLauncher:
    """Belongs to a session, which ends what it started. `observer` is told of actors that die and come back."""

    def __init__(self, session: Session, *, observer: Observer | None = None, start_timeout_s: float = START_S) -> None:
        self._session = session
        self._start_timeout_s = start_timeout_s
        self._observer = observer or Nobody()
        self.ports: dict[str, Any] = {OBSERVER: ObserverServer(self._observer)}
        """What lives in this process and actors may call, by id."""
        self._members: list[Member] = []
        self._attending: dict[Member, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def launch(
        self,
        name: str,
        resources: CPUResourcesConfig | AcceleratorResourcesConfig | Demand,
        *,
        names: Sequence[str] = (),
        group: PlacementGroup | Sequence[PlacementGroup] | str | None = None,
        bundles: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        python: str | None = None,
    ) -> list[Member]:
        """Start `resources.num_workers` actors, named `<name>-<number>` or by `names`. Blocks until all of them answer.

        In a placement group of their own; or in `group`, in its first bundles or those that `bundles` names, or each in
        one of several; or, with `FREE`, in none. `environment` are the variables they get, `python` is another
        interpreter than Ray's. Raises ConfigError when there is no room, with nothing left.
        """
        return self.begin(
            name, resources, names=names, group=group, bundles=bundles, environment=environment, python=python
        ).wait()

    def begin(
        self,
        name: str,
        resources: CPUResourcesConfig | AcceleratorResourcesConfig | Demand,
        *,
        names: Sequence[str] = (),
        group: PlacementGroup | Sequence[PlacementGroup] | str | None = None,
        bundles: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        python: str | None = None,
    ) -> Launch:
        """As `launch`, which is the same and then waits: the processes start while the caller does something else."""
        demand = resources if isinstance(resources, Demand) else resources.demand(name)
        names = names or [f"{name}-{number}" for number in range(demand.num_workers)]
        launch = Launch(self, demand)
        try:
            if group is None:
                group = self.reserve(demand)
                launch.groups.append(group)
            elif group == FREE:
                self._require_room(demand)
            for number, actor in enumerate(names):
                index = bundles[number] if bundles is not None else number
                place = (group, index) if isinstance(group, PlacementGroup | str) else (group[number], 0)
                handle = self.start(RemoteHost, demand, actor, *place, environment=environment, python=python)
                launch.members.append(Member(actor, handle))
        except BaseException:
            self.undo(launch)
            raise
        return launch

    def undo(self, launch: Launch) -> None:
        for member in launch.members:
            self._session.disown(actor=member.handle)
        for group in launch.groups:
            self._session.disown(group=group)

    def finish(self, launch: Launch) -> None:
        """Waits until all answer."""
        members, limit = launch.members, self._start_timeout_s
        refs = [member.handle.identify.remote() for member in members]
        ready, waiting = ray.wait(refs, num_returns=len(refs), timeout=limit)
        if waiting:
            missing = ", ".join(m.name for m, ref in zip(members, refs, strict=True) if ref in waiting)
            raise ConfigError(f"{missing} did not start within {limit:g} s; see the logs of Ray on its node")
        try:
            ray.get(ready, timeout=limit)
        except ray.exceptions.RayError as error:
            words = str(error).strip().splitlines()[-1]
            raise ConfigError(f"{launch.demand.name} could not be started: {words}") from None
        self._members += members

    def reserve(self, demand: Demand) -> PlacementGroup:
        """A placement group with one bundle for each worker; there when this returns, and ended with the session."""
        self._require_room(demand)
        group = placement_group([bundle_of(demand)] * demand.num_workers, strategy=demand.strategy, name="")
        self._session.own(group=group)
        if not group.wait(GROUP_S):
            self._session.disown(group=group)
            self._require_room(demand)
            raise ConfigError(f"{demand.name}: Ray made no placement group for it within {GROUP_S:g} s")
        return group

    def begin_apart(self, demand: Demand, names: Sequence[str], **options: Any) -> Launch:
        """As `begin`, each in a placement group of its own, which can be given back alone."""
        self._require_room(demand)
        groups: list[PlacementGroup] = []
        try:
            for _ in names:
                groups.append(self.reserve(msgspec.structs.replace(demand, num_workers=1)))
            launch = self.begin(demand.name, demand, names=names, group=groups, **options)
        except BaseException:
            for group in groups:
                self._session.disown(group=group)
            raise
        launch.groups = groups
        return launch

    def _require_room(self, demand: Demand) -> None:
        manager = CPUResourceManager(self._session.nodes())
        manager.add(demand)
        manager.check()

    def start(
        self,
        program: Any,
        demand: Demand,
        name: str,
        group: PlacementGroup | str,
        index: int,
        *,
        environment: Mapping[str, str] | None = None,
        python: str | None = None,
    ) -> Any:
        """One actor that runs `program`, whose argument is its name; it is not waited for, and not seen to."""
        # Ray would set it to the actor's CPUs; what computes sets its own threads, everything else needs one.
        runtime: dict[str, Any] = {"env_vars": {"OMP_NUM_THREADS": "1", **(environment or {})}}
        if python is not None:
            runtime["py_executable"] = python
        options: dict[str, Any] = {
            "num_cpus": demand.num_cpus,
            "memory": demand.memory,
            "runtime_env": runtime,
            "name": name,
            "namespace": self._session.namespace,
        }
        if demand.accelerator == "GPU":
            options["num_gpus"] = demand.accelerators
        elif demand.accelerator is not None:
            options["resources"] = {demand.accelerator: demand.accelerators}
        if isinstance(group, PlacementGroup):
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
        handle = program.options(**options).remote(name)
        self._session.own(actor=handle)
        return handle

    def give_back(self, *, actor: Any = None, group: PlacementGroup | None = None) -> None:
        """End what `start` started, and what `reserve` reserved."""
        self._session.disown(actor=actor, group=group)

    # While they live.

    def attend(self) -> None:
        """See to the actors from now on, on the event loop that runs. To be called again is harmless."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._attending = loop, {}
        for member in self._members:
            if member not in self._attending:
                attendant = Attendant(member, self.ports, self._observer, kill=restart)
                self._attending[member] = asyncio.create_task(attendant.run(), name=f"attend {member.name}")

    async def leave(self) -> None:
        """Stop seeing to them; what they call is not heard any more."""
        attending, self._attending = self._attending, {}
        await _end(*attending.values())

    async def end(self, member: Member, *, group: PlacementGroup | None = None) -> None:
        """It is not needed any more, nor is its place."""
        self._members = [other for other in self._members if other is not member]
        if (attending := self._attending.pop(member, None)) is not None:
            await _end(attending)
        await asyncio.to_thread(self._session.disown, actor=member.handle, group=group)


def restart(member: Member) -> None:
    """Kill it; Ray starts it again."""
    with contextlib.suppress(Exception):
        ray.kill(member.handle, no_restart=False)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
