"""SyncProduceStrategy: exactly one batch, made by the current weights, nothing left pending."""

from __future__ import annotations

import logging

from penstock.produce.context import ProduceContext
from penstock.produce.strategy import (
    PooledStrategy,
    PooledStrategyConfig,
    ProduceBatchStatus,
    ShouldContinueFn,
    default_should_continue,
)
from penstock.rollout import Status

logger = logging.getLogger(__name__)


class SyncProduceStrategy(PooledStrategy):
    """Plays a batch of groups and refills for every one that is filtered, failed, aborted or expired."""

    def __init__(
        self,
        *,
        should_continue_fn: ShouldContinueFn = default_should_continue,
        refill: bool = True,
        pause_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(should_continue_fn=should_continue_fn, pause_timeout_s=pause_timeout_s)
        self._refill = refill

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        started = 0
        while True:
            await self._pending.store_finished(ctx.put_now, ctx.buffer.flush)
            if ctx.should_abort():
                return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            completed = ctx.buffer.count(ctx.task_name, Status.COMPLETED)
            if not self._should_continue(completed, ctx.task_batch_size):
                return ProduceBatchStatus.NORMAL
            missing = ctx.task_batch_size - (completed + ctx.running_count() if self._refill else started)
            if missing > 0:
                # What a restart gave back comes first, in draw order.
                await self._start_groups(ctx, missing, [Status.ABORTED])
                started += missing
            elif not len(self._pending):
                if self._refill:
                    logger.warning(
                        "task %s: should_continue_fn asks for more than its batch of %d groups; %d are complete",
                        ctx.task_name, ctx.task_batch_size, completed,
                    )  # fmt: skip
                return ProduceBatchStatus.NORMAL
            await self._wait_for_change(ctx)


class SyncProduceStrategyConfig(PooledStrategyConfig):
    refill: bool = True
    """Whether a group that was filtered or failed is replaced by another prompt. Evaluation turns it off."""

    def build(self, *, sync_weights_interval: int = 1) -> SyncProduceStrategy:
        return SyncProduceStrategy(
            should_continue_fn=self.should_continue_fn, refill=self.refill, pause_timeout_s=self.pause_timeout_s
        )
