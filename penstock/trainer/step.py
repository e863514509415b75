"""One train step, from the groups of a batch to changed weights: prepare -> save trajectories -> train."""

from __future__ import annotations

import asyncio

from penstock.events import Observer, Warned
from penstock.learn.batch import BatchSettings, TokenColumns, TrainBatch, bare_batch, prepare_batch
from penstock.ports import TrainWorker
from penstock.produce import ProduceBatchResult
from penstock.replay import ReplayBuffer
from penstock.rollout import FloatArray, Group
from penstock.trainer.distillation import Teachers
from penstock.trainer.loops import Metrics, Stages
from penstock.trainer.trajectories import Trajectories

IDLE_STEPS = 3
"""Steps in a row without a gradient after which it is said."""


class TrainStep:
    """The `Learner` of a real run."""

    def __init__(
        self,
        worker: TrainWorker[TrainBatch],
        buffer: ReplayBuffer,
        trajectories: Trajectories,
        settings: BatchSettings,
        observer: Observer,
        *,
        deterministic: bool = False,
        teachers: Teachers | None = None,
    ) -> None:
        self._worker = worker
        self._buffer = buffer
        self._trajectories = trajectories
        self._settings = settings
        self._observer = observer
        self._deterministic = deterministic
        self._teachers = teachers
        self._logprobs: dict[str, list[FloatArray]] = {}
        self._idle_steps = 0

    async def learn(self, result: ProduceBatchResult, train_step: int, stages: Stages) -> Metrics:
        with stages("prepare"):
            batch = await self._prepare(result.groups, train_step, stages)
            await asyncio.to_thread(self._trajectories.save_step, train_step, result.groups, batch.advantages)
            with stages("ledger flush"):
                # What is trained must survive this process first.
                await self._buffer.flush()
        with stages("train"):
            outcome = await self._worker.train(batch)
        self._logprobs = outcome.logprobs
        metrics = batch.metrics | result.metrics()
        self._warn_if_idle(train_step, batch)
        return metrics | {f"train/{name}": value for name, value in outcome.metrics.items()}

    async def committed(self, train_step: int) -> None:
        if self._logprobs:
            await asyncio.to_thread(self._trajectories.save_logprobs, train_step, self._logprobs)
        self._logprobs = {}

    async def _prepare(self, groups: list[Group], train_step: int, stages: Stages) -> TrainBatch:
        settings = self._settings
        if self._deterministic:
            # Groups finish in an order that depends on timing; sums of floats depend on that order.
            groups = sorted(groups, key=lambda group: (group[0].task_name, group[0].draw))
        reference: TokenColumns | None = None
        if settings.kl_in_reward is not None:
            with stages("reference"):
                bare = bare_batch(groups, train_step=train_step, settings=settings)
                reference = await self._worker.score_reference(bare)
        teacher: TokenColumns | None = None
        if self._teachers is not None:
            with stages("teachers"):
                teacher = await self._teachers.score(groups)
        return prepare_batch(groups, train_step=train_step, settings=settings, reference=reference, teacher=teacher)

    def _warn_if_idle(self, train_step: int, batch: TrainBatch) -> None:
        self._idle_steps = self._idle_steps + 1 if batch.is_idle else 0
        if self._idle_steps == IDLE_STEPS:
            why = (
                "in 100 % of their groups all rewards are equal. Look at the rewards in trajectories/; prompts that "
                "are too easy or too hard, or a judge that always says the same, do this"
            )
            if not batch.metrics["trained_tokens"]:
                why = (
                    "all answers of the last one reached the token budget, and train.overlong.mask_truncated leaves "
                    "those out. Raise sample_params.max_tokens, or train what is cut off"
                )
            text = f"train steps {train_step - IDLE_STEPS + 1} to {train_step} had nothing to learn from: {why}"
            self._observer.notice(Warned(text=text, source="train"))
