"""The train worker of one process: a model in a thread of its own.

Everything that touches the model's tensors runs in that thread, one piece of work after the other, so a checkpoint
never holds half of a train step. Only the engines read the weights from elsewhere, between two steps, when a channel
publishes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.learn.batch import TrainBatch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.learner import Learner
from penstock.learn.snapshot import Snapshot
from penstock.learn.step_metrics import outcome
from penstock.learn.thread import OwnThread, result_of
from penstock.ports import TrainOutcome
from penstock.rollout import FloatArray
from penstock.unbuffered import FileSum


class TorchTrainWorker:
    """Implements `ports.TrainWorker[TrainBatch]`.

    Every call waits for those before it. A call that is cancelled returns when its work has ended: weights never
    change, and files are never written, behind the back of a caller who was told that it is over.
    """

    def __init__(
        self,
        config: TrainWorkerConfig,
        model_dir: Path,
        *,
        total_steps: int,
        deterministic: bool = False,
        threads: int | None = None,
        most_threads: int | None = None,
    ) -> None:
        self._learner = Learner(
            config,
            model_dir,
            total_steps=total_steps,
            deterministic=deterministic,
            threads=threads,
            most_threads=most_threads,
        )
        self._thread = OwnThread("penstock-train")
        self._writing = OwnThread("penstock-write", beside=True)

    async def train(self, batch: TrainBatch) -> TrainOutcome:
        """One train step, all or nothing.

        Raises StepRefused when loss or gradient is not finite, and RunError for a batch that cannot be split as
        configured; weights and optimiser are then what they were. Cancelled, it stops before its next micro-batch with
        the same promise; a step that had already reached its end stays done.
        """
        stopped = threading.Event()
        return outcome([await self._thread.run(lambda: self._learner.train(batch, stopped), stop=stopped.set)])

    async def score(self, batch: TrainBatch) -> dict[str, list[FloatArray]]:
        """The logprob of every token, trained or not, by rollout and segment."""
        return await self._thread.run(lambda: self._learner.score(batch))

    async def score_reference(self, batch: TrainBatch) -> dict[str, list[FloatArray]]:
        """The same of the reference model. Raises RunError where there is none."""
        return await self._thread.run(lambda: self._learner.score_reference(batch))

    async def save(self, directory: Path) -> dict[str, FileSum]:
        """Write `model.safetensors` and `optimizer.safetensors`. Raises StorageError."""
        return await self._thread.run(lambda: self._learner.save(directory))

    async def load(self, directory: Path) -> None:
        """Go on from what `save` wrote, to the bit. Raises CheckpointError, nothing changed, when it does not fit."""
        await self._thread.run(lambda: self._learner.load(directory))

    async def save_hf(self, directory: Path) -> None:
        """A float32 model directory with its tokenizer, which appears under its name only when it is complete."""
        await self._thread.run(lambda: self._learner.save_hf(directory))

    async def snapshot(self, *, optimizer: bool, export: bool) -> WorkerSnapshot:
        """The state as it is now, in memory of its own; it is written in a thread beside training.

        Returns at once. The copy is the next thing that the model's thread does: what changes weights comes after it.
        """
        taken = self._thread.begin(lambda: self._learner.snapshot(optimizer=optimizer, export=export))
        return WorkerSnapshot(taken, self._writing)

    @property
    def weights(self) -> ModelWeights:
        return ModelWeights(self._learner)

    @property
    def model(self) -> Any:
        """The transformers model, for those who compare with it."""
        return self._learner.model

    async def close(self) -> None:
        await self._writing.close()
        await self._thread.close()


class WorkerSnapshot:
    """Implements `ports.SavedState`. Cancelled, a call returns when its work has ended."""

    def __init__(self, taken: Future[Snapshot], thread: OwnThread) -> None:
        self._taken = taken
        self._thread = thread

    async def save(self, directory: Path) -> dict[str, FileSum]:
        taken = await result_of(self._taken)
        return await self._thread.run(lambda: taken.save(directory))

    async def save_hf(self, directory: Path) -> None:
        taken = await result_of(self._taken)
        await self._thread.run(lambda: taken.save_hf(directory))


class ModelWeights:
    """The live weights; implements `ports.WeightSource`."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._learner.tensors()
