"""AskOnceStrategy: every prompt exactly once. For evaluation; training would starve on what fails.

Each group that is drawn ends as an answer or as a counted failure; none is replaced by another.
"""

from __future__ import annotations

from penstock.produce.context import ProduceContext
from penstock.produce.strategy import PooledStrategy, PooledStrategyConfig, ProduceBatchStatus


class AskOnceStrategy(PooledStrategy):
    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        await self.start_groups(ctx, ctx.task_batch_size, [])
        while len(self._pending):
            if ctx.should_abort():
                return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            await self.wait_for_change(ctx)
            await self.store_finished(ctx)
        return ProduceBatchStatus.NORMAL


class AskOnceStrategyConfig(PooledStrategyConfig):
    def build(self, *, sync_weights_interval: int = 1) -> AskOnceStrategy:
        return AskOnceStrategy(pause_timeout_s=self.pause_timeout_s)
