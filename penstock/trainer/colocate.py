"""RLColocateTrainer: engine and trainer take turns on the same devices.

step t:  produce -> engine sleeps -> prepare -> save trajectories -> train -> commit -> checkpoint
         -> engine wakes -> sync -> log -> evaluate
"""

from __future__ import annotations

from penstock.trainer.base import RLTrainer, StageTimes


class RLColocateTrainer(RLTrainer):
    async def _run_steps(self) -> None:
        while self.summary.steps < self.config.total_steps and not self._may_stop():
            train_step, times = self.summary.steps + 1, StageTimes(self._display, self._profile)
            with self._profile.span(f"step {train_step}"):
                while not await self._step(train_step, times):
                    pass  # refused; three in a row end the run

    def _may_stop(self) -> bool:
        """An exact run stops where engine and trainer have the same weights, as a resumed one begins."""
        synced = self.summary.steps % self.config.sync_weights_interval == 0
        return self._stop_requested and (synced or not self.config.deterministic)

    async def _step(self, train_step: int, times: StageTimes) -> bool:
        """One train step; False when it was refused and must be tried again."""
        engine, manager = self.parts.engine, self.parts.manager
        with times.stage("produce"):
            served = await engine.model_step()
            result = await manager.produce_batch(self.config.train_batch_size, train_step, model_step=served)
            await engine.sleep()
        metrics = await self._train(result, train_step, times)
        with times.stage("sync"):
            await engine.wake()
            if metrics is not None and train_step % self.config.sync_weights_interval == 0:
                await self.parts.channel.publish(self.parts.worker.weights, train_step)
        if metrics is None:
            return False
        await self._log(train_step, metrics, times)
        await self._after_step(train_step)
        return True
