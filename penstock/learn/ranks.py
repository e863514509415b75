"""The train worker of several ranks.

                        +-- a call that all of them answer or refuse: nothing is lost
                        v
    starting ------> running -- a rank is lost --> all ended --> starting, as they were after the last step
                                                        |
                                                        +--> that is not to be had, or too often: the run ends

After every step the state of each rank is kept outside its process, so that new ranks go on from there, to the bit. The
step in which a rank was lost is not counted; `RankLost` gives its groups back.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.config import to_plain
from penstock.errors import PenstockError, RankLost, RanksUnavailable, StateLost, WeightSyncError
from penstock.events import ActorLost, ActorRecovered, Observer, Warned
from penstock.learn.batch import TrainBatch
from penstock.learn.config import RanksConfig, TrainWorkerConfig
from penstock.learn.rank import RankSetup
from penstock.learn.rank_group import Broken, Kept, RankGroup, RankLauncher, answers, refusals
from penstock.learn.rounds import Stopped
from penstock.learn.step_metrics import StepReport, outcome
from penstock.learn.thread import OwnLoop
from penstock.ports import TrainOutcome
from penstock.rollout import FloatArray
from penstock.unbuffered import FileSum
from penstock.weights.channel import WriterSettings
from penstock.weights.stored import StoredWeights

T = TypeVar("T")


class TrainRanks:
    """Implements `ports.TrainWorker[TrainBatch]`. Calls are made one after the other, in a loop of its own."""

    def __init__(self, setup: RankSetup, config: RanksConfig, launcher: RankLauncher, observer: Observer) -> None:
        """Blocks until every rank has the model. Raises ModelError, or RanksUnavailable when they do not start."""
        self._setup = setup
        self._config = config
        self._launcher = launcher
        self._observer = observer
        self._group: RankGroup | None = None
        self._sharded = setup.config.get("sharding") == "fsdp2"
        self._kept: dict[int, Kept] = {}
        """By rank, after its last step."""
        self._keepers: list[int] = []
        """Ranks whose kept state is whole."""
        self._origin: str | None = ""
        """What the ranks hold if it was not trained by them: of a checkpoint, or (empty) of the model's directory."""
        self._attempts = 0
        self._restarts = 0
        """Since the last step that was trained."""
        self._broken = Broken({})
        """What ended the last ranks."""
        self._lost: StateLost | None = None
        """Why there are no ranks any more."""
        self._published: tuple[WriterSettings, int] | None = None
        """How the weights were written last and as which model step, while the ranks have those."""
        self._written: tuple[RankGroup, StoredWeights] | None = None
        """Those, and the ranks that have them in their memory."""
        self._watching: asyncio.Task[None] | None = None
        self._missing: dict[int, float] = {}
        """Ranks that were lost and are not back, and since when."""
        self._closing = False
        self._turn = asyncio.Lock()
        self._loop = OwnLoop("penstock-ranks")
        try:
            self._loop.run_blocking(self._begin())
        except BaseException:
            self._loop.run_blocking(self._end())
            self._loop.close()
            raise

    # The port.

    async def train(self, batch: TrainBatch) -> TrainOutcome:
        """One train step, all or nothing, on all ranks.

        Raises what a learner raises, and RankLost when a rank was lost: weights and optimiser are what they were.
        Raises StateLost when those are lost too, RanksUnavailable when the ranks do not come back.
        """
        return await self._loop.run(self._train(batch), stop=self._ask_to_stop)

    async def score(self, batch: TrainBatch) -> dict[str, list[FloatArray]]:
        return await self._scores("score", batch)

    async def score_reference(self, batch: TrainBatch) -> dict[str, list[FloatArray]]:
        """Of the reference model. Raises RunError where there is none."""
        return await self._scores("score_reference", batch)

    async def _scores(self, method: str, batch: TrainBatch) -> dict[str, list[FloatArray]]:
        parts = await self._call(method, batch)
        scores = {rollout: segments for part in parts for rollout, segments in part.items()}
        return {answer.rollout_id: scores[answer.rollout_id] for answer in batch.answers}

    async def save(self, directory: Path) -> dict[str, FileSum]:
        """Every rank writes its part; all of them must see the directory. Raises StorageError."""
        parts = await self._call("save", _name(directory))
        return {name: written for part in parts for name, written in part.items()}

    async def snapshot(self, *, optimizer: bool, export: bool) -> None:
        """None: the ranks write what they hold themselves, before they go on."""

    async def load(self, directory: Path) -> None:
        """What any number of ranks saved. Raises CheckpointError when it does not fit."""
        await self._loop.run(self._repeated(lambda: self._load(_name(directory))))

    async def save_hf(self, directory: Path) -> None:
        await self._call("save_hf", _name(directory))

    @property
    def weights(self) -> RankWeights:
        return RankWeights(self)

    @property
    def address(self) -> str:
        """Of the first rank, where the weights are when they are published."""
        return self._group.address if self._group is not None else ""

    async def close(self) -> None:
        """Ends the ranks, whatever they do. Idempotent."""
        if not self._closing:
            self._closing = True
            await self._loop.run(self._end())
            await asyncio.to_thread(self._loop.close)

    # For the weights.

    async def write_weights(self, settings: WriterSettings, model_step: int) -> StoredWeights:
        """Gathered by all ranks, written by the first, wherever that is by now."""

        return await self._loop.run(self._repeated(lambda: self._write(settings, model_step)))

    async def write_again(self, model_step: int) -> StoredWeights:
        """What was written last, where it is by now: it lies in the memory of a rank, and is gone with it.

        Raises WeightSyncError when the ranks have other weights than these, StateLost when they have none.
        """

        async def write() -> StoredWeights:
            if self._published is None or self._published[1] != model_step:
                raise WeightSyncError(f"weights {model_step} are lost with the rank that had them; a sync brings newer")
            stored = await self._write(*self._published)
            answers(await self._running.call("confirm_weights"))
            return stored

        async def find() -> StoredWeights:
            published, written = self._published, self._written
            if published is not None and published[1] == model_step and written is not None:
                group, stored = written
                if group is self._group and not group.lost:
                    return stored
            return await self._repeated(write)

        return await self._loop.run(find())

    async def confirm_weights(self) -> None:
        await self._call("confirm_weights")

    async def close_weights(self) -> None:
        """Of ranks that are lost nothing is left to close: they are not brought back for it."""
        group = self._group
        if self._closing or group is None or group.lost:
            return

        async def close() -> None:
            async with self._turn:
                answers(await group.call("close_weights"))

        with contextlib.suppress(PenstockError, Broken):
            await self._loop.run(close())

    # In the loop.

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        async def call() -> list[Any]:
            return answers(await self._running.call(method, *arguments))

        return await self._loop.run(self._repeated(call))

    @property
    def _running(self) -> RankGroup:
        assert self._group is not None
        return self._group

    async def _write(self, settings: WriterSettings, model_step: int) -> StoredWeights:
        group = self._running
        here = msgspec.structs.replace(settings, address=group.address)
        stored: StoredWeights = answers(await group.call("write_weights", here, model_step))[0]
        self._published, self._written = (settings, model_step), (group, stored)
        return stored

    async def _begin(self) -> None:
        try:
            await self._start()
        except Broken as broken:
            raise RanksUnavailable(f"the train ranks did not start. {broken}") from broken

    async def _train(self, batch: TrainBatch) -> TrainOutcome:
        async with self._turn:
            await self._bring_back()
            self._attempts += 1
            try:
                reports = _agreed(await self._running.call("train", batch, self._attempts))
                await self._keep()
            except Broken as broken:
                await self._recover(broken)
                raise broken.cause or RankLost(
                    f"train step {batch.train_step} is not counted, and the ranks are as they were before it. {broken}"
                ) from broken
            self._restarts, self._origin = 0, None
            self._published = None
            return outcome(reports)

    def _ask_to_stop(self) -> None:
        """The step ends on all ranks before the next micro-batch of any."""
        attempt = self._attempts

        def ask() -> None:
            for host in self._group.hosts if self._group is not None else ():
                self._loop.spawn(host.call("stop", attempt))

        self._loop.call_soon(ask)

    async def _load(self, directory: str) -> None:
        settled = await self._running.call("load", directory)
        refused = refusals(settled)
        if refused and len(refused) < len(settled):
            raise Broken({}, refused[0])  # some have it, some have not
        answers(settled)
        self._forget_kept()
        self._origin, self._published = directory, None

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        """A call that leaves the state of the ranks as it is, or sets it; made again by new ranks."""
        async with self._turn:
            while True:
                await self._bring_back()
                try:
                    return await call()
                except Broken as broken:
                    await self._recover(broken)
                    if broken.cause is not None:
                        raise broken.cause from broken

    # What is lost, and back again.

    async def _start(self) -> None:
        group = self._group = await RankGroup.start(self._launcher, self._setup, self._config)
        self._watching = asyncio.create_task(self._watch(group), name="watch the train ranks")

    async def _watch(self, group: RankGroup) -> None:
        """A rank that dies while nothing is asked of it is back before something is."""
        await group.one_lost()
        async with self._turn:
            if self._group is group:
                with contextlib.suppress(PenstockError):  # whoever asks next is told
                    await self._bring_back()

    async def _bring_back(self) -> None:
        if self._lost is not None:
            raise StateLost(str(self._lost)) from self._lost
        if self._group is None:
            await self._recover(self._broken)
        elif self._group.lost:
            await self._recover(Broken(self._group.lost))

    async def _recover(self, broken: Broken) -> None:
        """Returns when the ranks are as they were after the last step. Raises RanksUnavailable or StateLost."""
        while True:
            self._broken = broken
            await self._end_group(broken)
            self._restarts += 1
            if self._closing:
                raise RanksUnavailable("the train ranks were closed")
            if self._restarts > self._config.max_restarts:
                raise RanksUnavailable(
                    f"the train ranks were lost {self._restarts} times without a step between, the last time so: "
                    f"{broken}. Resume when it is mended"
                )
            if self._origin is None and not self._kept:
                self._lost = StateLost(f"the train ranks are lost, and their weights with them. {broken}")
                raise self._lost
            try:
                await self._start()
                await self._restore()
            except Broken as again:
                broken = again
                continue
            self._tell_recovered()
            return

    async def _end_group(self, broken: Broken) -> None:
        """All ranks: those that were not lost could only wait for those that were."""
        lost = await self._group.lost_with(broken.culprits) if self._group is not None else broken.culprits
        now = asyncio.get_running_loop().time()
        for rank, reason in lost.items():
            if rank not in self._missing:
                self._missing[rank] = now
                self._observer.notice(ActorLost(actor=f"rank-{rank}", reason=reason))
        group, self._group = self._group, None
        if group is not None:
            await group.end()

    def _tell_recovered(self) -> None:
        now, missing, self._missing = asyncio.get_running_loop().time(), self._missing, {}
        for rank, since in sorted(missing.items()):
            node = self._running.hosts[rank].node
            self._observer.notice(ActorRecovered(actor=f"rank-{rank}", seconds=round(now - since, 3), node=node))

    async def _restore(self) -> None:
        group = self._running
        if self._origin is not None:
            if self._origin:
                answers(await group.call("load", self._origin))
            return
        own = [self._kept[rank] for rank in range(len(group.hosts))]
        problem: PenstockError | None = None
        # Where each has all of it, any of those that kept it will do.
        for given in [own] if self._sharded else [[self._kept[keeper]] * len(own) for keeper in self._keepers]:
            problem = next(iter(refusals(await group.take(given, "weights"))), None)
            if problem is None:
                answers(await group.take(own, "rng"))
                return
        self._lost = StateLost(f"the train ranks were lost, and what was kept of their weights with them: {problem}")
        # They have the weights they began with: nobody may train those.
        await self._end_group(Broken({}))
        raise self._lost from problem

    async def _keep(self) -> None:
        if not self._config.keep_state:
            return
        group = self._running
        self._keepers = _keepers(group, sharded=self._sharded)
        settled = await group.keep(set(self._keepers))
        self._forget_kept()
        if refused := refusals(settled):
            costs = "one that is lost costs all steps after the newest checkpoint"
            self._observer.notice(Warned(text=f"the ranks' state is not kept: {costs}. {refused[0]}", source="train"))
        else:
            self._kept = dict(enumerate(settled))

    def _forget_kept(self) -> None:
        kept, self._kept = self._kept, {}
        for each in kept.values():
            each.close()

    async def _end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        group, self._group = self._group, None
        if group is not None:
            await group.end()
        self._forget_kept()
        await self._launcher.close()


def build_ranks(
    config: TrainWorkerConfig,
    model_dir: Path,
    num_ranks: int,
    launcher: RankLauncher,
    observer: Observer,
    *,
    total_steps: int,
    deterministic: bool = False,
    threads: int | None = None,
) -> TrainRanks:
    """Blocks until they have the model; `threads` is the number of CPU threads for each. Raises as `TrainRanks`."""
    config.check()
    setup = RankSetup(
        config=to_plain(config),
        model_dir=_name(model_dir),
        total_steps=total_steps,
        deterministic=deterministic,
        threads=threads,
        size=num_ranks,
        timeout_s=config.ranks.exchange_timeout_s,
        paths=tuple(path or str(Path.cwd()) for path in sys.path),
    )
    return TrainRanks(setup, config.ranks, launcher, observer)


class RankWeights:
    """The weights of the ranks: they write them themselves. Implements `weights.DistantWeights`."""

    def __init__(self, ranks: TrainRanks) -> None:
        self._ranks = ranks

    def store(self, settings: WriterSettings) -> RankStore:
        return RankStore(self._ranks, settings)


class RankStore:
    def __init__(self, ranks: TrainRanks, settings: WriterSettings) -> None:
        self._ranks = ranks
        self._settings = settings

    async def write(self, model_step: int) -> StoredWeights:
        return await self._ranks.write_weights(self._settings, model_step)

    async def confirm(self) -> None:
        await self._ranks.confirm_weights()

    async def close(self) -> None:
        await self._ranks.close_weights()


def _agreed(settled: list[Any]) -> list[StepReport]:
    """The reports of a step that all ranks made. Raises what one refused, or Stopped, when none of them made it."""
    reports = [each for each in settled if isinstance(each, StepReport)]
    if len(reports) == len(settled):
        return reports
    refused = next(iter(refusals(settled)), None)
    if reports:
        raise Broken({}, refused)
    raise refused or Stopped


def _name(directory: Path) -> str:
    """As processes elsewhere find it."""
    return str(directory.absolute())


def _keepers(group: RankGroup, *, sharded: bool) -> list[int]:
    """Ranks that keep everything: all of them, or, where each has all of it, the first of each of two machines."""
    if sharded:
        return list(range(len(group.hosts)))
    firsts: dict[str, int] = {}
    for rank, host in enumerate(group.hosts):
        firsts.setdefault(host.node, rank)
    return list(firsts.values())[:2]
