"""What a run writes so that another process can go on from it, how that goes on, and what is exported for others."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.events import CheckpointWritten, Exported, Note, Observer
from penstock.learn.batch import TrainBatch
from penstock.learn.rng import restore_rng, rng_state
from penstock.ports import SavedState, TrainWorker
from penstock.produce import AgentLoopManager
from penstock.replay import ReplayBuffer
from penstock.trainer.arithmetic import STATE as ARITHMETIC
from penstock.trainer.arithmetic import Arithmetic
from penstock.trainer.checkpoints import Checkpoint, CheckpointStore
from penstock.trainer.loops import Metrics, Stages
from penstock.trainer.origin import ModelOrigin
from penstock.trainer.summary import SummarySink
from penstock.trainer.writer import CheckpointWriter

if TYPE_CHECKING:
    from torch import Tensor

LANE = "checkpoint"


class RunCheckpointer:
    """The `Checkpointer` of a real run, and its way back.

    A checkpoint has weights and optimiser, random numbers, the summary, the metrics of its step, what was counted since
    the last batch, the position of the ledger, the checksums of the model it was made from and what it computes in; the
    groups are in the ledger.
    Checkpoint 0 has no weights.

    They are written beside training, in the order in which they are due: an export is whole before a later checkpoint
    is, so that a restart makes up any that is missing.
    """

    def __init__(
        self,
        store: CheckpointStore,
        worker: TrainWorker[TrainBatch],
        buffer: ReplayBuffer,
        manager: AgentLoopManager,
        summary: SummarySink,
        observer: Observer,
        *,
        run_dir: Path,
        made_from: ModelOrigin,
        arithmetic: Arithmetic,
        config: dict[str, Any],
    ) -> None:
        self._writer = CheckpointWriter(observer)
        self._begun: int | None = None
        """The step of the newest checkpoint that is written, or being written, by this process."""
        self._store = store
        self._worker = worker
        self._buffer = buffer
        self._manager = manager
        self._summary = summary
        self._observer = observer
        self._hf_dir = run_dir / "hf"
        self._made_from = msgspec.to_builtins(made_from)
        self._arithmetic = msgspec.to_builtins(arithmetic)
        self._config = config

    # Keeping.

    async def keep(self, train_step: int, metrics: Metrics, *, checkpoint: bool, export: bool) -> None:
        """A snapshot is taken and written beside training; this only waits until the one before is written.

        A worker that gives no snapshot writes what it holds now: then this returns when it is written.
        """
        await self._writer.wait(f"step {train_step}")
        snapshot = await self._worker.snapshot(optimizer=checkpoint, export=export) if train_step else None
        if checkpoint:
            self._begin_checkpoint(train_step, metrics, snapshot)
        if export:
            self._begin_export(self._hf_dir / f"step-{train_step}", train_step, snapshot)
        if snapshot is None:
            await self._writer.wait()

    def keep_last(self, train_step: int, metrics: Metrics) -> None:
        """What is still missing after the last step. No weight changes any more: there is no snapshot, and no wait."""
        if self._begun != train_step and train_step not in self._store.steps():
            self._begin_checkpoint(train_step, metrics, None)
        if train_step:
            self._begin_export(self._hf_dir / "final", train_step, None)

    def check(self) -> None:
        self._writer.check()

    def writing(self) -> CheckpointWriter:
        """To be entered around everything that keeps."""
        return self._writer

    def _begin_checkpoint(self, train_step: int, metrics: Metrics, snapshot: SavedState | None) -> None:
        rng_tensors, rng = rng_state()
        position = self._buffer.position
        state = {
            "ledger_position": position,
            "rng": rng,
            "progress": self._manager.progress.state_dict(),
            "summary": self._summary.plain(),
            "metrics": dict(metrics),
            "made_from": self._made_from,
            ARITHMETIC: self._arithmetic,
        }
        source = snapshot or self._worker
        self._begun = train_step
        self._writer.begin(f"checkpoint {train_step}", lambda: self._write(train_step, state, rng_tensors, source))

    async def _write(
        self, train_step: int, state: dict[str, Any], rng_tensors: dict[str, Tensor], source: SavedState
    ) -> None:
        started = time.perf_counter()
        stages = Stages(self._observer, train_step=train_step or None, lane=LANE)
        # The producer goes on recording: what the checkpoint names must be durable before it is.
        with stages("ledger flush"):
            await self._buffer.flush()
        with stages("write checkpoint"):
            await self._store.save(
                train_step,
                fill=source.save if train_step else None,
                tensors={"rng": rng_tensors},
                state=state,
                config=self._config,
            )
        # Only now are groups of that step final.
        await self._buffer.prune(min(self._store.steps()))
        self._observer.notice(CheckpointWritten(train_step=train_step, seconds=time.perf_counter() - started))

    def _begin_export(self, directory: Path, train_step: int, snapshot: SavedState | None) -> None:
        source = snapshot or self._worker
        self._writer.begin(f"export {train_step}", lambda: self._export(directory, train_step, source))

    async def _export(self, directory: Path, train_step: int, source: SavedState) -> None:
        with Stages(self._observer, train_step=train_step, lane=LANE)("export"):
            await source.save_hf(directory)
        self._observer.notice(Exported(train_step=train_step, directory=str(directory)))

    # Going on.

    async def restore(self, checkpoint: Checkpoint) -> Metrics:
        """Weights, optimiser and random numbers of the checkpoint, every group from the ledger.

        Returns the metrics of its step. Raises CheckpointError when it does not fit.
        """
        state, step = checkpoint.state, checkpoint.step
        if step:
            await self._worker.load(checkpoint.path)
        rules = {name: task.runtime.stale_rule for name, task in self._manager.tasks.items()}
        restored = self._buffer.restore(
            step,
            rules,
            position=state["ledger_position"],
            # Before the ledger goes back: a later checkpoint must not be the newest of a lineage that was left.
            accepted=lambda: self._store.abandon_after(step),
        )
        self._manager.resume(step, restored, state.get("progress"))
        await asyncio.to_thread(self._remove_exports_after, step)
        restore_rng(checkpoint.tensors("rng"), state["rng"])
        self._summary.restart(state["summary"], step)
        returned = {found.value: n for found, n in restored.returned.items()}
        self._observer.notice(Note(text=f"at step {step}; groups given back: {returned or 'none'}"))
        metrics: Metrics = state["metrics"]
        return metrics

    async def make_up_export(self, train_step: int) -> None:
        """The one that was due at a step whose checkpoint was written, and for which the process did not live."""
        if not (self._hf_dir / f"step-{train_step}").exists():
            await self.keep(train_step, {}, checkpoint=False, export=True)

    def _remove_exports_after(self, step: int) -> None:
        """Of a lineage that was left: `make_up_export` would take one for its own."""
        for directory in self._hf_dir.glob("step-*"):
            number = directory.name.removeprefix("step-")
            if number.isdecimal() and int(number) > step:
                shutil.rmtree(directory, ignore_errors=True)
