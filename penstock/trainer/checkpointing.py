"""What a run writes so that another process can go on from it, how that goes on, and what is exported for others."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from penstock.events import CheckpointWritten, Exported, Note, Observer
from penstock.learn.batch import TrainBatch
from penstock.learn.rng import restore_rng, rng_state
from penstock.ports import TrainWorker
from penstock.produce import AgentLoopManager
from penstock.replay import ReplayBuffer
from penstock.trainer.checkpoints import Checkpoint, CheckpointStore
from penstock.trainer.loops import Metrics, Stages
from penstock.trainer.origin import ModelOrigin
from penstock.trainer.summary import SummarySink


class RunCheckpointer:
    """The `Checkpointer` of a real run, and its way back.

    A checkpoint has weights and optimiser, random numbers, the summary, the metrics of its step, the position of the
    ledger and the checksums of the model it was made from; the groups are in the ledger. Checkpoint 0 has no weights.
    """

    def __init__(
        self,
        store: CheckpointStore,
        worker: TrainWorker[TrainBatch],
        buffer: ReplayBuffer,
        summary: SummarySink,
        observer: Observer,
        *,
        run_dir: Path,
        made_from: ModelOrigin,
        config: dict[str, Any],
    ) -> None:
        self._store = store
        self._worker = worker
        self._buffer = buffer
        self._summary = summary
        self._observer = observer
        self._hf_dir = run_dir / "hf"
        self._made_from = msgspec.to_builtins(made_from)
        self._config = config

    async def save(self, train_step: int, metrics: Metrics) -> None:
        started = time.perf_counter()
        stages = Stages(self._observer, train_step=train_step or None)
        # The producer goes on recording: what the checkpoint names must be durable before it is.
        position = self._buffer.position
        with stages("ledger flush"):
            await self._buffer.flush()
        rng_tensors, rng = rng_state()
        state = {
            "ledger_position": position,
            "rng": rng,
            "summary": self._summary.plain(),
            "metrics": metrics,
            "made_from": self._made_from,
        }
        with stages("write checkpoint"):
            await self._store.save(
                train_step,
                fill=self._worker.save if train_step else None,
                tensors={"rng": rng_tensors},
                state=state,
                config=self._config,
            )
        await self._buffer.prune(min(self._store.steps()))
        self._observer.notice(CheckpointWritten(train_step=train_step, seconds=time.perf_counter() - started))

    async def restore(self, checkpoint: Checkpoint, manager: AgentLoopManager) -> Metrics:
        """Weights, optimiser and random numbers of the checkpoint, every group from the ledger.

        Returns the metrics of its step. Raises CheckpointError when it does not fit.
        """
        state, step = checkpoint.state, checkpoint.step
        if step:
            await self._worker.load(checkpoint.path)
        rules = {name: task.runtime.stale_rule for name, task in manager.tasks.items()}
        restored = self._buffer.restore(
            step,
            rules,
            position=state["ledger_position"],
            # Before the ledger goes back: a later checkpoint must not be the newest of a lineage that was left.
            accepted=lambda: self._store.abandon_after(step),
        )
        manager.resume(step, restored)
        await asyncio.to_thread(self._remove_exports_after, step)
        restore_rng(checkpoint.tensors("rng"), state["rng"])
        self._summary.restart(state["summary"], step)
        returned = {found.value: n for found, n in restored.returned.items()}
        self._observer.notice(Note(text=f"at step {step}; groups given back: {returned or 'none'}"))
        metrics: Metrics = state["metrics"]
        return metrics

    async def export(self, train_step: int) -> None:
        await self._export(self._hf_dir / f"step-{train_step}", train_step)

    async def export_final(self, train_step: int) -> None:
        await self._export(self._hf_dir / "final", train_step)

    async def make_up_export(self, train_step: int) -> None:
        """The one that was due at a step whose checkpoint was written, and for which the process did not live."""
        if not (self._hf_dir / f"step-{train_step}").exists():
            await self.export(train_step)

    def _remove_exports_after(self, step: int) -> None:
        """Of a lineage that was left: `make_up_export` would take one for its own."""
        for directory in self._hf_dir.glob("step-*"):
            number = directory.name.removeprefix("step-")
            if number.isdecimal() and int(number) > step:
                shutil.rmtree(directory, ignore_errors=True)

    async def _export(self, directory: Path, train_step: int) -> None:
        with Stages(self._observer, train_step=train_step)("export"):
            await self._worker.save_hf(directory)
        self._observer.notice(Exported(train_step=train_step, directory=str(directory)))
