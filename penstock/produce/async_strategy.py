"""AsyncProduceStrategy: keeps groups in flight across train steps, within the staleness bound.

Per task, at any time: running + completed <= target + over-sample budget - consumed. The target is extended to step f
only while weights m may serve it (f - m - 1 < threshold), so what waits is bounded by
(m + threshold - next consumer step + 1) batches plus the budget.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import pydantic

from penstock.produce.context import ProduceContext
from penstock.produce.strategy import (
    PooledStrategy,
    PooledStrategyConfig,
    ProduceBatchStatus,
    ShouldContinueFn,
    default_should_continue_fn,
)
from penstock.replay import StaleRule, calculate_seq_staleness, calculate_stale_threshold
from penstock.rollout import Status

logger = logging.getLogger(__name__)

NORMAL = ProduceBatchStatus.NORMAL


class AsyncProduceStrategy(PooledStrategy):
    def __init__(
        self,
        *,
        stale_threshold: int,
        over_sample_threshold: float = 0.0,
        enable_partial_rollout: bool = False,
        tail_batch_trigger_size: int = -1,
        tail_batch_max_tries: int | None = None,
        should_continue_fn: ShouldContinueFn = default_should_continue_fn,
        pause_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(
            should_continue_fn=should_continue_fn,
            enable_partial_rollout=enable_partial_rollout,
            max_tries=tail_batch_max_tries,
            pause_timeout_s=pause_timeout_s,
        )
        self._stale_threshold = stale_threshold
        self._over_sample_threshold = over_sample_threshold
        self._tail_batch_trigger_size = tail_batch_trigger_size

    def is_model_expired(self, train_step: int, model_step: int) -> bool:
        return calculate_seq_staleness(model_step, train_step) >= self._stale_threshold

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        target = ctx.target_abs
        if target <= 0:
            return NORMAL
        if (stop := self._stop(ctx)) is not None:
            return stop
        await self.store_finished(ctx)
        # Fixed for this call; everything else is read live.
        tail_batch = 0 < self._tail_batch_trigger_size <= ctx.expired_count()
        budget = 0 if tail_batch else math.ceil(self._over_sample_threshold * ctx.task_batch_size)
        scheduled_target = target + budget
        while True:
            if (stop := self._stop(ctx)) is not None:
                return stop
            if not self.should_continue(ctx.available_count(), target):
                return NORMAL
            while scheduled_target > ctx.available_count() + ctx.running_count() and not ctx.should_abort():
                await self.start_groups(ctx, 1, self._statuses(ctx, tail_batch))
            if not len(self._pending) and not ctx.should_abort():
                logger.warning(
                    "task %s: should_continue_fn asks for more than the %d groups that are due; %d are available",
                    ctx.task_name, target, ctx.available_count(),
                )  # fmt: skip
                return NORMAL
            await self.wait_for_change(ctx)
            await self.store_finished(ctx)

    def _stop(self, ctx: ProduceContext) -> ProduceBatchStatus | None:
        if ctx.should_abort():
            return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        if self.is_model_expired(ctx.train_step, ctx.model_step):
            return ProduceBatchStatus.EXPIRED_BATCH
        return None

    def _statuses(self, ctx: ProduceContext, tail_batch: bool) -> list[Status]:
        """Which waiting groups are played before new ones are drawn."""
        if tail_batch:
            return [Status.EXPIRED, Status.MAX_TRIES, Status.ABORTED]
        if self._tail_batch_trigger_size == 0 and ctx.buffer.count(ctx.task_name, Status.EXPIRED):
            return [Status.EXPIRED, Status.ABORTED]
        return [Status.ABORTED]


class AsyncProduceStrategyConfig(PooledStrategyConfig):
    """Produce ahead of the trainer, within a bound on staleness."""

    over_sample_threshold: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """Groups started beyond the target, as a share of the task's batch, rounded up."""
    enable_partial_rollout: bool = False
    """An interrupted rollout continues from its tokens under the new weights."""
    max_staleness: int = pydantic.Field(default=0, ge=0)
    """In sync periods."""
    max_token_staleness: int | None = pydantic.Field(default=None, ge=0)
    """In sync periods; older tokens are masked out of the loss."""
    tail_batch_trigger_size: int = pydantic.Field(default=-1, ge=-1)
    """Expired groups: -1 discarded; 0 made again at once; N wait until there are N, then one batch without
    over-sampling."""
    tail_batch_max_tries: int | None = pydantic.Field(default=None, ge=1)
    """An interrupted rollout that started again this often waits for a tail batch, which is not interrupted."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.tail_batch_max_tries is not None and (self.tail_batch_trigger_size <= 0 or self.enable_partial_rollout):
            yield (
                f"tail_batch_max_tries is {self.tail_batch_max_tries}; it needs tail_batch_trigger_size > 0 "
                f"(is {self.tail_batch_trigger_size}) and enable_partial_rollout=False"
            )

    @property
    def keeps_turns(self) -> bool:
        return self.enable_partial_rollout

    def stale_rule(self, sync_weights_interval: int) -> StaleRule:
        token_staleness = self.max_token_staleness
        return StaleRule(
            calculate_stale_threshold(self.max_staleness, sync_weights_interval),
            None if token_staleness is None else calculate_stale_threshold(token_staleness, sync_weights_interval),
            discard_expired=self.tail_batch_trigger_size == -1,
        )

    def build(self, *, sync_weights_interval: int = 1) -> AsyncProduceStrategy:
        if self.max_staleness > 0 and not self.enable_partial_rollout and self.tail_batch_max_tries is None:
            logger.warning(
                "max_staleness=%d without enable_partial_rollout and without tail_batch_max_tries: an answer longer "
                "than a sync period is started again at every weight sync and may never finish",
                self.max_staleness,
            )
        if self.max_token_staleness is not None and self.max_token_staleness > self.max_staleness:
            logger.warning(
                "max_token_staleness=%d above max_staleness=%d masks no token: a rollout expires before one is that "
                "old", self.max_token_staleness, self.max_staleness,
            )  # fmt: skip
        return AsyncProduceStrategy(
            stale_threshold=calculate_stale_threshold(self.max_staleness, sync_weights_interval),
            over_sample_threshold=self.over_sample_threshold,
            enable_partial_rollout=self.enable_partial_rollout,
            tail_batch_trigger_size=self.tail_batch_trigger_size,
            tail_batch_max_tries=self.tail_batch_max_tries,
            should_continue_fn=self.should_continue_fn,
            pause_timeout_s=self.pause_timeout_s,
        )
