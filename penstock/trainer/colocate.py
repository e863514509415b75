"""RLColocateTrainer: engine and trainer take turns on the same devices.

step t:  produce -> engine sleeps -> prepare -> save trajectories -> train -> commit -> checkpoint
         -> engine wakes -> sync -> log -> evaluate
"""

from __future__ import annotations

from penstock.trainer.base import RLTrainer, StageTimes


class RLColocateTrainer(RLTrainer):
    async def _run_steps(self) -> None:
        train_step = self.summary.steps + 1
        while train_step <= self.config.total_steps and not self._stop_requested:
            if await self._step(train_step, StageTimes(self._display)):
                train_step += 1

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
                await self.parts.channel.publish(self.parts.worker, train_step)
        if metrics is None:
            return False
        self._log(train_step, metrics, times)
        await self._after_step(train_step)
        return True
