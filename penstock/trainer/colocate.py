"""RLColocateTrainer: engine and trainer take turns on the same devices.

step t:  produce -> engine sleeps -> prepare -> save trajectories -> train -> commit -> engine wakes, sync -> evaluate
"""

from __future__ import annotations

from penstock.trainer.base import RLTrainer, StageTimes


class RLColocateTrainer(RLTrainer):
    _engine_step = 0
    """The weights the engine serves."""

    async def _run_steps(self) -> None:
        train_step = 1
        while train_step <= self.config.total_steps and not self._stop_requested:
            times = StageTimes(self._display)
            if await self._step(train_step, times):
                train_step += 1

    async def _step(self, train_step: int, times: StageTimes) -> bool:
        """One train step; False when it was refused and must be tried again."""
        engine, manager = self.parts.engine, self.parts.manager
        with times.stage("produce"):
            result = await manager.produce_batch(self.config.train_batch_size, train_step, model_step=self._engine_step)
            await engine.sleep()
        metrics = await self._train(result, train_step, times)
        with times.stage("sync"):
            await engine.wake()
            if metrics is not None and train_step % self.config.sync_weights_interval == 0:
                await self.parts.channel.publish(self.parts.worker, train_step)
                self._engine_step = train_step
        if metrics is None:
            return False
        self._log(train_step, metrics, times)
        await self._after_step(train_step)
        return True
