"""Where the parts of a run live. A trainer knows ports; the `Site` it was given decides what stands behind them.

`LocalSite` is this machine: train worker and engines in this process or in processes that it starts. Another one puts
them elsewhere and hands out proxies; it is given to `config.build(site=...)`, and whoever made it closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.errors import RunError
from penstock.events import Observer
from penstock.learn.batch import TrainBatch
from penstock.models.cores import available_cores
from penstock.ports import Engines, Local, Placement, Tokenizer, TrainWorker, WeightChannel
from penstock.resources import actor_problems

if TYPE_CHECKING:
    from penstock.trainer.config import RLTrainerConfig


class RunContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a run are built from."""

    config: RLTrainerConfig
    model_dir: Path
    tokenizer: Tokenizer
    observer: Observer
    run_dir: Path | None = None
    """None when nothing is trained."""


class Site(Protocol):
    """Every part it builds is closed by whoever asked for it."""

    @property
    def placement(self) -> Placement:
        """Of agent loops and judgers."""
        ...

    async def lost(self) -> str:
        """Returns when what all parts live on is gone, with the reason."""
        ...

    def problems(self, config: RLTrainerConfig, *, trains: bool = True) -> Iterator[str]:
        """What this configuration asks for and cannot have here, to train or only to evaluate. Asked before anything
        is built."""
        ...

    def prepare(self, config: RLTrainerConfig, *, trains: bool = True) -> None:
        """Begin what takes a while and was found to fit; the run is loaded meanwhile."""
        ...

    def build_worker(self, run: RunContext) -> TrainWorker[TrainBatch]:
        """Blocks while the model is loaded. Raises ModelError."""
        ...

    def build_engines(self, run: RunContext) -> Engines:
        """All engines behind their one door. May block while models are loaded. Raises ModelError."""
        ...

    def build_channel(self, run: RunContext, worker: TrainWorker[TrainBatch], engines: Engines) -> WeightChannel:
        """From the worker's weights to the engines, both of which this site built."""
        ...


@contextlib.asynccontextmanager
async def ends_with(site: Site, then: str = "") -> AsyncIterator[None]:
    """What is done within ends with RunError as soon as the site is lost, whatever it waits for. `then` is what can be
    done about it."""
    main, reasons = asyncio.current_task(), list[str]()
    assert main is not None

    async def watch() -> None:
        reasons.append(await site.lost())
        main.cancel()

    watching = asyncio.create_task(watch(), name="watch the site")
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        # What it met meanwhile, it met for that reason. Somebody else may have cancelled it as well: that counts more.
        if not reasons or main.uncancel() > 0:
            raise
        raise RunError(reasons[0] + then) from (error if isinstance(error, Exception) else None)
    finally:
        watching.cancel()


class LocalSite:
    """This process, and those it starts."""

    placement: Placement = Local()

    async def lost(self) -> str:
        """Never: it would be lost with it."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    def problems(self, config: RLTrainerConfig, *, trains: bool = True) -> Iterator[str]:
        yield from actor_problems(config.that_runs(trains=trains))
        if trains and has_ranks(config) and config.engines.channel == "in_process":
            yield "engines.channel is 'in_process'; an engine in this process cannot read the memory of train ranks"

    def prepare(self, config: RLTrainerConfig, *, trains: bool = True) -> None:
        pass

    def build_worker(self, run: RunContext) -> TrainWorker[TrainBatch]:
        """One unsharded rank is this process; others have processes of their own, and divide the threads."""
        config = run.config
        if has_ranks(config):
            from penstock.learn.rank_process import ProcessRanks
            from penstock.learn.ranks import build_ranks

            ranks = config.resources.train.num_workers
            return build_ranks(
                config.train,
                run.model_dir,
                ranks,
                ProcessRanks(),
                run.observer,
                total_steps=config.total_steps,
                deterministic=config.deterministic,
                threads=max(1, (config.threads()[0] or available_cores()) // ranks),
            )
        return config.train.build(
            run.model_dir,
            total_steps=config.total_steps,
            deterministic=config.deterministic,
            threads=config.threads()[0],
            most_threads=config.most_threads(),
        )

    def build_engines(self, run: RunContext) -> Engines:
        config = run.config
        return config.engines.build(
            str(run.model_dir),
            run.tokenizer,
            deterministic=config.deterministic,
            threads=config.threads()[1],
            most_threads=config.most_threads(),
            observer=run.observer,
        )

    def build_channel(self, run: RunContext, worker: TrainWorker[TrainBatch], engines: Engines) -> WeightChannel:
        assert run.run_dir is not None, "weights are only published where something is trained"
        timeout_s = run.config.sync_timeout_s
        return run.config.engines.build_channel(worker.weights, engines, run_dir=run.run_dir, timeout_s=timeout_s)


def has_ranks(config: RLTrainerConfig) -> bool:
    """Whether the train worker is ranks in processes or actors of their own."""
    return config.resources.train.num_workers > 1 or config.train.sharding != "none"
