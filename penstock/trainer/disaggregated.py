"""RLDisaggregatedTrainer: a producer in the background, the trainer in front of it, coupled by the replay buffer alone.

    step t:  wait for the batch of t  ||  the producer makes the next ones
             -> prepare -> save trajectories -> train -> commit -> checkpoint
             -> every s steps, or when the producer's weights are too old: pause -> sync -> continue
             -> log -> evaluation of model step t starts beside training; the next sync waits for it

What is waited for: the batch (bounded by the manager's watchdog), the drain of a pause, the engines' confirmation of
new weights, and a running evaluation before its weights are replaced.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from penstock.errors import RunError
from penstock.ports import Engine
from penstock.produce import ProduceBatchStatus
from penstock.trainer.base import RLTrainer, StageTimes
from penstock.trainer.config import RLTrainerConfig
from penstock.trainer.display import Display
from penstock.trainer.parts import Parts
from penstock.trainer.resume import Beginning


class RLDisaggregatedTrainer(RLTrainer):
    def __init__(
        self, config: RLTrainerConfig, parts: Parts, run_dir: Path, display: Display, beginning: Beginning
    ) -> None:
        super().__init__(config, parts, run_dir, display, beginning)
        self._evaluating: asyncio.Task[None] | None = None
        self._engine_clock = EngineClock(getattr(config, "num_engines", 1))

    async def _run_steps(self) -> None:
        manager = self.parts.manager
        producer = asyncio.create_task(manager.produce_loop(self.config.train_batch_size), name="produce loop")
        try:
            await manager.continue_produce(self.summary.steps)
            await self._engine_clock.idle_share(self.parts.engine)
            while self.summary.steps < self.config.total_steps and not self._stop_requested:
                train_step, times = self.summary.steps + 1, StageTimes(self._display, self._profile)
                with self._profile.span(f"step {train_step}"):
                    while not await self._step(train_step, times):
                        pass  # after a sync, or refused; three in a row end the run
            await self._finish_evaluation()
            await self._end_production(producer)
            if manager.model_step != self.summary.steps:
                await self.parts.channel.publish(self.parts.worker.weights, self.summary.steps)
        finally:
            for task in (producer, self._evaluating):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*filter(None, (producer, self._evaluating)), return_exceptions=True)

    async def _end_production(self, producer: asyncio.Task[None]) -> None:
        """What fails now failed in groups that no step of this run needs; they wait in the ledger."""
        try:
            await self.parts.manager.shutdown()
            await producer
        except RunError as error:
            self._display.note(f"the producer ended with {type(error).__name__}: {error}")

    async def _step(self, train_step: int, times: StageTimes) -> bool:
        """One train step; False when it must be tried again: after a sync, or because it was refused."""
        with times.stage("produce"):
            result = await self.parts.manager.get_batch(self.config.train_batch_size, train_step)
        expired = result.status is ProduceBatchStatus.EXPIRED_BATCH
        if not result.groups:
            await self._sync(train_step - 1, times)
            return False
        metrics = await self._train(result, train_step, times)
        if metrics is None:
            return False
        last = train_step == self.config.total_steps
        if not last and (expired or train_step % self.config.sync_weights_interval == 0):
            await self._sync(train_step, times)
        metrics["share/engine_idle"] = await self._engine_clock.idle_share(self.parts.engine)
        metrics["share/trainer_wait"] = times.seconds["produce"] / sum(times.seconds.values())
        await self._log(train_step, metrics, times)
        await self._after_step(train_step)
        return True

    async def _sync(self, model_step: int, times: StageTimes) -> None:
        """Bring the engines to `model_step`; what is in flight is stored first and goes on under the new weights."""
        with times.stage("sync"):
            await self._finish_evaluation()
            await self.parts.manager.pause_produce()
            await self.parts.channel.publish(self.parts.worker.weights, model_step)
            await self.parts.manager.continue_produce(model_step)

    async def _evaluate_between_steps(self, model_step: int) -> None:
        """Starts beside training; the engines serve exactly these weights until it has ended."""
        if self.parts.evaluator is None:
            return
        if self.parts.manager.model_step != model_step:
            await self._sync(model_step, StageTimes(self._display, self._profile))
        await self._finish_evaluation()
        self._evaluating = asyncio.create_task(
            self._evaluate(model_step, shares_engine=True), name=f"evaluation of {model_step}"
        )

    async def _checkpoint(self, train_step: int, metrics: dict[str, float]) -> None:
        """A running evaluation ends first: nobody could ask these weights again after a restart."""
        await self._finish_evaluation()
        await super()._checkpoint(train_step, metrics)

    async def _finish_evaluation(self) -> None:
        evaluating, self._evaluating = self._evaluating, None
        if evaluating is not None:
            await evaluating


class EngineClock:
    """How much of the time an engine had nothing to do."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._looked_at = 0.0
        self._busy_seconds = 0.0

    async def idle_share(self, engine: Engine) -> float:
        """Since the last look."""
        now, busy = time.perf_counter(), (await engine.stats()).busy_seconds
        wall = now - self._looked_at
        busy_share = (busy - self._busy_seconds) / (wall * self._engines) if wall > 0 else 1.0
        share = 1.0 - min(1.0, max(0.0, busy_share))
        self._looked_at, self._busy_seconds = now, busy
        return share
