"""RaySite: where the parts of a run live when it is given `--address`."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator

import msgspec
import ray
from ray.util.placement_group import PlacementGroup

from penstock.cluster.engines import CONTROLLER, CONTROLLER_RESOURCES, EngineActors, RayEngines
from penstock.cluster.launcher import CPUActorLauncher
from penstock.cluster.placement import RayPlacement
from penstock.cluster.resources import CPUResourceManager
from penstock.cluster.session import Session
from penstock.events import Observer
from penstock.learn.batch import TrainBatch
from penstock.ports import Engines, TrainWorker, WeightChannel
from penstock.resources import Demand, actor_demands, engines_demand, with_actors
from penstock.trainer.config import RLColocateTrainerConfig, RLTrainerConfig
from penstock.trainer.site import LocalSite, RunContext, has_ranks

SHARED = 0.5
"""Of an accelerator, for each of the two that take turns on it."""


def worker_demands(config: RLTrainerConfig, *, trains: bool = True) -> list[Demand]:
    """Of engines and train ranks: together where they take turns on the same devices, else apart."""
    engines = engines_demand(config.resources.engines, config.engines.num_engines)
    if not trains:
        return [engines]
    ranks = config.resources.train.demand("train ranks")
    if not isinstance(config, RLColocateTrainerConfig):
        return [ranks, engines]
    both = Demand(
        name="train ranks and engines, in turn",
        num_workers=max(ranks.num_workers, engines.num_workers),
        num_cpus=ranks.num_cpus + engines.num_cpus,
        memory=ranks.memory + engines.memory,
        accelerator=ranks.accelerator,
        strategy=ranks.strategy,
    )
    return [both]


class RaySite(LocalSite):
    """Agent loops and judgers in actors as they ask for it; every engine in one, and every rank where there are any."""

    def __init__(self, session: Session, *, observer: Observer) -> None:
        self._session = session
        self._launcher = CPUActorLauncher(session, observer=observer)
        self._actors = RayPlacement(self._launcher)
        self.placement = self._actors
        self._shared: PlacementGroup | None = None

    async def lost(self) -> str:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[str] = loop.create_future()

        def tell(words: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(found.set_result, words)

        forget = self._session.connection.when_lost(tell)
        try:
            return await found
        finally:
            forget()

    def problems(self, config: RLTrainerConfig, *, trains: bool = True) -> Iterator[str]:
        """What does not fit, with the node that is closest to having room. Nothing is started for it."""
        if config.engines.channel == "in_process":
            yield "engines.channel is 'in_process'; an engine that is an actor cannot read the trainer's memory"
        train, engines = config.resources.train.accelerator, config.resources.engines.accelerator
        if trains and isinstance(config, RLColocateTrainerConfig) and train != engines:
            yield (
                f"resources.train.accelerator is {train!r} and resources.engines.accelerator {engines!r}; in a "
                "colocated run they take turns on the same devices: give both the same"
            )
        manager = CPUResourceManager(self._session.nodes())
        for demand in actor_demands(config.that_runs(trains=trains)).values():
            manager.add(demand)
        for demand in worker_demands(config, trains=trains):
            manager.add(demand)
        manager.add(CONTROLLER_RESOURCES.demand(CONTROLLER))
        yield from manager.problems()

    def prepare(self, config: RLTrainerConfig, *, trains: bool = True) -> None:
        self._actors.begin(with_actors(config.that_runs(trains=trains)))

    def build_worker(self, run: RunContext) -> TrainWorker[TrainBatch]:
        """One unsharded rank is this process; others are actors."""
        config, resources = run.config, run.config.resources.train
        if not has_ranks(config):
            return super().build_worker(run)
        from penstock.cluster.ranks import ActorRanks
        from penstock.learn.ranks import build_ranks

        group = self._shared_group(run)
        threads = config.cpu_threads or max(1, math.floor(resources.num_cpus_per_worker))
        ranks = ActorRanks(
            self._launcher,
            msgspec.structs.replace(resources.demand("train ranks"), accelerators=self._share(run)),
            group=group,
            environment={"OMP_NUM_THREADS": str(threads)},
        )
        return build_ranks(
            config.train,
            run.model_dir,
            resources.num_workers,
            ranks,
            run.observer,
            total_steps=config.total_steps,
            deterministic=config.deterministic,
            threads=threads,
        )

    def build_engines(self, run: RunContext) -> Engines:
        """Returns when their actors are there; the models are loaded with the first call."""
        group = self._shared_group(run)
        actors = EngineActors(self._launcher, run, group=group, share=self._share(run))
        return RayEngines(self._launcher, actors, run.config.engines)

    def _shared_group(self, run: RunContext) -> PlacementGroup | None:
        """Of a colocated run: rank and engine of one number stand in one bundle. None where they have their own."""
        if run.run_dir is None or not isinstance(run.config, RLColocateTrainerConfig):
            return None
        if self._shared is None:
            (demand,) = worker_demands(run.config)
            self._shared = self._launcher.reserve(demand)
        return self._shared

    def _share(self, run: RunContext) -> float:
        """What a rank and an engine take of an accelerator each."""
        return SHARED if self._shared_group(run) is not None else 1.0

    def build_channel(self, run: RunContext, worker: TrainWorker[TrainBatch], engines: Engines) -> WeightChannel:
        """Engines on the trainer's machine read its memory, the others are sent the weights."""
        assert run.run_dir is not None, "weights are only published where something is trained"
        if has_ranks(run.config):
            from penstock.learn.ranks import TrainRanks

            assert isinstance(worker, TrainRanks) and isinstance(engines, RayEngines), "both are of this site"
            engines.weights_are_at(worker.write_again)
        return run.config.engines.build_channel(
            worker.weights,
            engines,
            run_dir=run.run_dir,
            timeout_s=run.config.sync_timeout_s,
            address=ray.util.get_node_ip_address(),
        )
