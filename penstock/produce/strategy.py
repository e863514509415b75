"""ProduceStrategy: how a batch is made. Public, may be subclassed; the manager uses its methods and nothing else.

`PooledStrategy` adds what the built-in ones share, and is public too: groups played concurrently by one owner, and the
pause that drains them. A subclass says how many are started and when:

    class OneByOne(PooledStrategy):
        async def produce_batch(self, ctx):
            while ctx.available_count() < ctx.target_abs and not ctx.should_abort():
                await self.start_groups(ctx, 1, [Status.ABORTED])
                await self.wait_for_change(ctx)
                await self.store_finished(ctx)
            return UPDATE_WEIGHT_AND_ABORT if ctx.should_abort() else NORMAL

However far a strategy would go, the manager makes nothing due that the engines' weights may not serve.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import pydantic

from penstock.config import Config, dotted_name
from penstock.errors import UserFunctionError
from penstock.produce.attempt import Attempt
from penstock.produce.context import ProduceContext
from penstock.produce.pending import PendingTasks
from penstock.replay import StaleRule, calculate_stale_threshold
from penstock.rollout import RolloutState, Status


class ProduceBatchStatus(enum.StrEnum):
    """Why `produce_batch` came back: all that is due is there, a pause begins, or the weights are too old."""

    NORMAL = "normal"
    UPDATE_WEIGHT_AND_ABORT = "update_weight_and_abort"
    EXPIRED_BATCH = "expired_batch"


@runtime_checkable
class IsValidSampleFn(Protocol):
    """Whether a completed group may be trained; False filters it (dynamic sampling)."""

    def __call__(self, samples: list[RolloutState]) -> bool: ...


@runtime_checkable
class ShouldContinueFn(Protocol):
    """Whether to go on producing. Both are group counts: per call for Sync, since the run began for Async."""

    def __call__(self, completed_count: int, batch_size: int, **kwargs: Any) -> bool: ...


def default_is_valid_sample_fn(samples: list[RolloutState]) -> bool:
    return True


def default_should_continue_fn(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
    return completed_count < batch_size


def has_different_rewards(samples: list[RolloutState]) -> bool:
    """A group whose rewards are all equal teaches nothing: the filter of dynamic sampling."""
    return len({sample.reward.score for sample in samples if sample.reward is not None}) > 1


class ProduceStrategy(abc.ABC):
    """Decides how many groups to start, when, and when a batch is done. Subclass it for one of your own."""

    @abc.abstractmethod
    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        """Produce until the task's target is reached, a pause comes, or the model is too old."""

    async def pause_produce(self, ctx: ProduceContext) -> float:
        """Bring everything pending home; returns the seconds it took."""
        return 0.0

    async def end_produce(self, ctx: ProduceContext) -> float:
        """As `pause_produce`, and nothing is left at work: the run ends."""
        return await self.pause_produce(ctx)

    def abandon(self) -> None:
        """Stop what is pending and store none of it: nobody will ask for it again."""
        return

    def is_model_expired(self, train_step: int, model_step: int) -> bool:
        """Whether weights `model_step` are too old to produce for `train_step`."""
        return False

    def pending_task_count(self) -> int:
        return 0

    def attempts(self) -> Iterator[Attempt]:
        """The attempts being played, as far as it keeps them: for the message of a stalled run, and for those that a
        pause waits for."""
        return iter(())


class ProduceStrategyConfig(Config, abc.ABC):
    """Base of strategy configurations."""

    is_valid_sample_fn: IsValidSampleFn = default_is_valid_sample_fn
    """`(group) -> bool`: whether a judged group is trained; others are discarded as filtered."""
    should_continue_fn: ShouldContinueFn = default_should_continue_fn
    """`(completed_count, batch_size) -> bool`: whether a colocated step goes on producing."""

    @abc.abstractmethod
    def build(self, *, sync_weights_interval: int = 1) -> ProduceStrategy: ...

    @property
    def keeps_turns(self) -> bool:
        """Whether finished turns of a rollout at work go to the ledger: of no use where it starts again."""
        return True

    def stale_rule(self, sync_weights_interval: int) -> StaleRule:
        """When this task's groups expire, and what becomes of them."""
        return StaleRule(calculate_stale_threshold(0, sync_weights_interval), discard_expired=True)

    def problems(self) -> Iterator[str]:
        yield from _function_problems("is_valid_sample_fn", self.is_valid_sample_fn, "(samples) -> bool", [])
        yield from _function_problems(
            "should_continue_fn", self.should_continue_fn, "(completed_count, batch_size) -> bool", 0, 1
        )


def _function_problems(field: str, function: Callable[..., Any], called: str, *arguments: object) -> Iterator[str]:
    name = dotted_name(function)
    if inspect.iscoroutinefunction(function):
        yield f"{field}: {name} is async; it is called as {called} and not awaited"
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        yield f"{field}: {name} is called as {called}: {error}"
    except ValueError:
        pass  # a function without a readable signature


class PooledStrategy(ProduceStrategy):
    """Plays groups concurrently. Subclasses say how many and which."""

    def __init__(
        self,
        *,
        should_continue_fn: ShouldContinueFn = default_should_continue_fn,
        enable_partial_rollout: bool = False,
        max_tries: int | None = None,
        pause_timeout_s: float = 300.0,
    ) -> None:
        self._should_continue_fn = should_continue_fn
        self._enable_partial_rollout = enable_partial_rollout
        self._max_tries = max_tries
        self._pause_timeout_s = pause_timeout_s
        self._pending = PendingTasks()

    def pending_task_count(self) -> int:
        return len(self._pending)

    async def pause_produce(self, ctx: ProduceContext) -> float:
        """Store everything pending: finished, or ABORTED with what it has. After the deadline the rest is cancelled.

        Groups that cannot be played again are left at work, over the pause.
        """
        if not len(self._pending):
            return 0.0
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._pause_timeout_s):
                if ctx.replayable:
                    await self._pending.drain(ctx.put_generated_group, ctx.buffer.flush)
                else:
                    await self._pending.store_finished(ctx.put_generated_group, ctx.buffer.flush)
        except TimeoutError:
            await self._pending.cancel(ctx.put_generated_group, ctx.buffer.flush)
        except asyncio.CancelledError:
            self._pending.abandon()
            raise
        return loop.time() - started

    async def end_produce(self, ctx: ProduceContext) -> float:
        if ctx.replayable:
            return await self.pause_produce(ctx)
        loop = asyncio.get_running_loop()
        started = loop.time()
        await self._pending.cancel(ctx.put_generated_group, ctx.buffer.flush)
        return loop.time() - started

    def abandon(self) -> None:
        self._pending.abandon()

    def attempts(self) -> Iterator[Attempt]:
        return self._pending.attempts()

    async def start_groups(self, ctx: ProduceContext, n: int, statuses: Sequence[Status]) -> None:
        """Start up to n groups; stops when a pause begins. A sampled group is always scheduled, so none is lost."""
        for _ in range(n):
            if ctx.should_abort():
                return
            group = await ctx.sample_group(statuses)
            attempt = ctx.begin(group, enable_partial_rollout=self._enable_partial_rollout, max_tries=self._max_tries)
            self._pending.schedule(attempt, ctx.play(attempt), ctx.changed)

    async def store_finished(self, ctx: ProduceContext) -> int:
        """Store what finished since the last time; returns how many groups, when they are durable."""
        return await self._pending.store_finished(ctx.put_generated_group, ctx.buffer.flush)

    async def wait_for_change(self, ctx: ProduceContext) -> None:
        """Until a group finished, a pause begins, the available count changes, or nothing is pending any more.

        The manager's watchdog bounds this wait.
        """
        available = ctx.available_count()
        await ctx.changed.wait_until(
            lambda: (
                self._pending.has_finished
                or ctx.should_abort()
                or ctx.available_count() != available
                or not len(self._pending)
            )
        )

    def should_continue(self, completed: int, target: int) -> bool:
        try:
            return bool(self._should_continue_fn(completed, target))
        except Exception as error:
            raise UserFunctionError(
                f"should_continue_fn {dotted_name(self._should_continue_fn)} raised {type(error).__name__}: {error}"
            ) from error


class PooledStrategyConfig(ProduceStrategyConfig, abc.ABC):
    """Base of the configurations of strategies that play groups concurrently."""

    pause_timeout_s: float = pydantic.Field(default=300.0, gt=0, allow_inf_nan=False)
    """How long a pause waits for what is pending before it cancels the rest."""
