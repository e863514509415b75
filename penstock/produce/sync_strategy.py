"""SyncProduceStrategy: exactly one batch, made by the current weights, nothing left pending."""

from __future__ import annotations

import logging

from penstock.produce.context import ProduceContext
from penstock.produce.strategy import PooledStrategy, PooledStrategyConfig, ProduceBatchStatus
from penstock.rollout import Status

logger = logging.getLogger(__name__)


class SyncProduceStrategy(PooledStrategy):
    """Plays a batch of groups and refills for every one that is filtered, failed, aborted or expired."""

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        while True:
            await self.store_finished(ctx)
            if ctx.should_abort():
                return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            completed = ctx.buffer.count(ctx.task_name, Status.COMPLETED)
            if not self.should_continue(completed, ctx.task_batch_size):
                return ProduceBatchStatus.NORMAL
            missing = ctx.task_batch_size - completed - ctx.running_count()
            if missing > 0:
                # What a restart gave back comes first, in draw order.
                await self.start_groups(ctx, missing, [Status.ABORTED])
            elif not len(self._pending):
                logger.warning(
                    "task %s: should_continue_fn asks for more than its batch of %d groups; %d are complete",
                    ctx.task_name, ctx.task_batch_size, completed,
                )  # fmt: skip
                return ProduceBatchStatus.NORMAL
            await self.wait_for_change(ctx)


class SyncProduceStrategyConfig(PooledStrategyConfig):
    """Produce exactly the batch, from the weights as they are."""

    @property
    def keeps_turns(self) -> bool:
        return False

    def build(self, *, sync_weights_interval: int = 1) -> SyncProduceStrategy:
        return SyncProduceStrategy(should_continue_fn=self.should_continue_fn, pause_timeout_s=self.pause_timeout_s)
