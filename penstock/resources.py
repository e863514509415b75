"""What the parts of a run take of the machines they run on. Nothing here knows how that is had: see `cluster/`.

ActorsConfig            of agent loops and judgers: how many actors, and what each takes
CPUResourcesConfig      a number of equal CPU workers, and how they are spread
RunResourcesConfig      what train ranks and engines take
Demand                  any of them, as it is added up and checked before anything starts
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import msgspec
import pydantic

from penstock.config import Config, all_parts
from penstock.ports import GiB

PackStrategy = Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"]
"""Of the workers over the nodes: as far apart as there is room, as close; the strict ones, or not at all."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """A number of equal workers."""

    name: str
    """For people."""
    num_workers: int
    num_cpus: float
    """Of each."""
    memory: int
    accelerator: str | None = None
    """The kind of which each has `accelerators`."""
    accelerators: float = 1.0
    """Less than one where a train rank and an engine take turns on it."""
    strategy: PackStrategy = "SPREAD"


class CPUResourcesConfig(Config):
    """What a number of equal CPU workers takes, and how they are spread over the nodes."""

    num_workers: int = pydantic.Field(default=1, ge=1)
    """How many there are."""
    num_cpus_per_worker: float = pydantic.Field(default=1.0, gt=0, allow_inf_nan=False)
    """What each asks for."""
    cpu_memory_per_worker: int = pydantic.Field(default=GiB, gt=0)
    """In bytes."""
    pg_pack_strategy: PackStrategy = "SPREAD"
    """How they are spread over the nodes: apart, together; the strict ones, or not at all."""

    def demand(self, name: str) -> Demand:
        return Demand(
            name=name,
            num_workers=self.num_workers,
            num_cpus=self.num_cpus_per_worker,
            memory=self.cpu_memory_per_worker,
            strategy=self.pg_pack_strategy,
        )


class ActorsConfig(Config):
    """How many actors something has, and what each takes. Equal ones are built once, whoever asks for them."""

    num_ray_actors: int = pydantic.Field(default=0, ge=0)
    """0 lives in this process, 1 in an actor, n in n actors behind a router. Others than 0 need Ray (`--address`)."""
    num_cpus_per_actor: float = pydantic.Field(default=1.0, gt=0, allow_inf_nan=False)
    """What each asks for."""
    cpu_memory_per_actor: int = pydantic.Field(default=GiB, gt=0)
    """In bytes."""

    @property
    def actors_name(self) -> str:
        """For people."""
        return type(self).__name__

    def actors_home(self) -> str:
        """Two with the same one live in the same actors."""
        return json.dumps(self.describe(), sort_keys=True)

    def actors_environment(self) -> tuple[str, ...]:
        """Variables that the actors get, by name."""
        return ()

    def actors_demand(self) -> Demand:
        return CPUResourcesConfig(
            num_workers=self.num_ray_actors,
            num_cpus_per_worker=self.num_cpus_per_actor,
            cpu_memory_per_worker=self.cpu_memory_per_actor,
        ).demand(self.actors_name)


def actor_demands(*configs: Config) -> dict[str, Demand]:
    """What the actors of all parts of these configurations take, by home."""
    return {part.actors_home(): part.actors_demand() for part in with_actors(*configs)}


def with_actors(*configs: Config) -> list[ActorsConfig]:
    """The parts of these configurations that live in actors."""
    return [part for _, part in _with_actors(*configs)]


def actor_problems(*configs: Config) -> Iterator[str]:
    """Why a run that is not placed on Ray refuses these configurations."""
    for path, part in _with_actors(*configs):
        yield f"{path}num_ray_actors is {part.num_ray_actors}; that needs Ray: give --address local, or make it 0"


def _with_actors(*configs: Config) -> Iterator[tuple[str, ActorsConfig]]:
    for config in configs:
        for path, part in all_parts(config):
            if isinstance(part, ActorsConfig) and part.num_ray_actors:
                yield f"{path}." if path else "", part


class WorkerResourcesConfig(Config):
    """What one worker takes. How many there are is said elsewhere."""

    num_cpus_per_worker: float = pydantic.Field(default=1.0, gt=0, allow_inf_nan=False)
    """What it asks for."""
    cpu_memory_per_worker: int = pydantic.Field(default=GiB, gt=0)
    """In bytes."""
    accelerator: str | None = None
    """The name under which a cluster counts them, `GPU`; one for each worker. None: it computes on CPUs."""


class AcceleratorResourcesConfig(WorkerResourcesConfig):
    """What a number of equal workers takes."""

    num_workers: int = pydantic.Field(default=1, ge=1)
    """How many there are."""

    def demand(self, name: str) -> Demand:
        return _worker_demand(self, name, self.num_workers)


class RunResourcesConfig(Config):
    """What a run takes on a cluster, but for agent loops and judgers, which say it themselves."""

    train: AcceleratorResourcesConfig = AcceleratorResourcesConfig()
    """`num_workers` is the number of ranks."""
    engines: WorkerResourcesConfig = WorkerResourcesConfig()
    """For each engine; their number is `engines.num_engines`."""


def engines_demand(resources: WorkerResourcesConfig, num_engines: int) -> Demand:
    return _worker_demand(resources, "engines", num_engines)


def _worker_demand(resources: WorkerResourcesConfig, name: str, num_workers: int) -> Demand:
    return Demand(
        name=name,
        num_workers=num_workers,
        num_cpus=resources.num_cpus_per_worker,
        memory=resources.cpu_memory_per_worker,
        accelerator=resources.accelerator,
        strategy="PACK",
    )
