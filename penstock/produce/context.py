"""ProduceContext: the one argument a strategy gets. Everything it may ask or do for one task is here.

`train_step` is the step being produced and decides whether the model is too old; `progress.next_consumer_step` decides
staleness when a group is stored. The two are never exchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from penstock.config import dotted_name
from penstock.data import Sampler
from penstock.errors import RunError, UserFunctionError
from penstock.ports import AgentLoop
from penstock.produce.failures import FailurePolicy
from penstock.produce.progress import ProduceProgress
from penstock.replay import DiscardReason, GroupState, ReplayBuffer, Signal, StaleRule
from penstock.rollout import Failure, FailureReason, Group, RolloutState, Status, count_tokens, get_group_status

IsValidSample = Callable[[Group], bool]


class Attempt(msgspec.Struct):
    """One playing of a group, from the moment it starts until it is stored."""

    model_step: int
    started_at: float
    group: Group
    tokens_before: int
    kept: frozenset[str]
    """Rollouts that were complete before; this attempt does not count them again."""
    enable_partial_rollout: bool
    max_tries: int | None
    protected: bool
    """A pause waits for it: one of its rollouts was interrupted as often as allowed."""
    forgotten_tokens: int = 0
    looked_at: bool = False
    """The last playing came back and its versions were checked."""
    begun_with: dict[str, int] = {}
    """Tokens that rollouts already had when they were last given to the agent loop."""

    @property
    def playing(self) -> list[str]:
        return [rollout.rollout_id for rollout in self.group if rollout.rollout_id not in self.kept]


class TaskRuntime(msgspec.Struct):
    """The parts of one task; they live as long as the manager."""

    name: str
    agent_loop: AgentLoop
    sampler: Sampler
    buffer: ReplayBuffer
    stale_rule: StaleRule
    is_valid_sample: IsValidSample
    failures: FailurePolicy
    attempts: dict[str, Attempt] = {}
    group_seconds: list[float] = []
    """Durations of the groups that completed since the last batch."""


class ProduceContext:
    def __init__(
        self,
        runtime: TaskRuntime,
        *,
        progress: ProduceProgress,
        task_batch_size: int,
        train_step: int,
        model_step: int,
        update_event: asyncio.Event,
    ) -> None:
        self.task_name = runtime.name
        self.agent_loop = runtime.agent_loop
        self.sampler = runtime.sampler
        self.buffer = runtime.buffer
        self.progress = progress
        self.task_batch_size = task_batch_size
        self.train_step = train_step
        self.model_step = model_step
        self.stale_threshold = runtime.stale_rule.stale_threshold
        self.update_event = update_event
        self._runtime = runtime

    # What a strategy may ask.

    @property
    def changed(self) -> Signal:
        """Notified when a group finishes, moves in the buffer, or the abort signal changes."""
        return self.buffer.changed

    @property
    def consumer_step(self) -> int:
        return self.progress.next_consumer_step

    @property
    def target_abs(self) -> int:
        """Groups due since the run began. Raises KeyError for a task the progress does not know."""
        return self.progress.target_samples[self.task_name]

    def available_count(self) -> int:
        """Groups consumed or ready to be."""
        return self.progress.consumed_samples[self.task_name] + self.buffer.count(self.task_name, Status.COMPLETED)

    def expired_count(self) -> int:
        """Groups that wait for a tail batch."""
        return self.buffer.count(self.task_name, Status.EXPIRED) + self.buffer.count(self.task_name, Status.MAX_TRIES)

    def running_count(self) -> int:
        """Groups being played or not yet stored."""
        return self.buffer.state_count(self.task_name, GroupState.RUNNING)

    def should_abort(self) -> bool:
        return self.update_event.is_set()

    # What a strategy may do.

    async def sample_group(self, group_status: Sequence[Status] = ()) -> Group:
        """A waiting group of one of these statuses, else a new one."""
        return await self.sampler.sample(self.task_name, group_status=list(group_status))

    async def generate_group(
        self, group: Group, *, enable_partial_rollout: bool = False, max_tries: int | None = None
    ) -> Group:
        """Play a group; failed rollouts are made again within their budgets, their siblings are kept.

        An interrupted group comes back with ABORTED rollouts, in the state the pause found them.
        """
        loop = asyncio.get_running_loop()
        attempt = Attempt(
            model_step=self.model_step,
            started_at=loop.time(),
            group=group,
            tokens_before=count_tokens(group),
            kept=frozenset([r.rollout_id for r in group if r.status is Status.COMPLETED]),
            enable_partial_rollout=enable_partial_rollout,
            max_tries=max_tries,
            protected=any(rollout.status is Status.MAX_TRIES for rollout in group),
        )
        self._runtime.attempts[group[0].group_id] = attempt
        for rollout in group:
            if rollout.status is Status.EXPIRED:
                attempt.forgotten_tokens += self.buffer.forget_response(rollout, "re_rolled")
        group = await self._play(group, attempt)
        while failed := [rollout for rollout in group if rollout.status is Status.FAILED]:
            given_up = [rollout for rollout in failed if not self._runtime.failures.may_retry(rollout)]
            if given_up and not self._runtime.failures.may_leave(given_up, group):
                break
            for rollout in given_up:
                attempt.forgotten_tokens += self.buffer.forget_response(rollout, DiscardReason.UNJUDGED)
            group = [rollout for rollout in group if rollout not in given_up]
            again = [rollout for rollout in failed if rollout not in given_up]
            if again and not await self._prepare_retry(again, attempt):
                break
            group = await self._play(group, attempt)
        seconds = loop.time() - attempt.started_at
        for rollout in group:
            rollout.group_generate_time_s = seconds
        return group

    async def put_generated_group(self, group: Group) -> bool:
        """Store a played group, or discard it with a reason. True only if it is COMPLETED after the put.

        Returns when that is durable.
        """
        completed = await self.put_now(group)
        await self.buffer.flush()
        return completed

    async def put_now(self, group: Group) -> bool:
        """`put_generated_group` without the wait for the disk; for those who store several and flush once."""
        attempt = self._runtime.attempts.pop(group[0].group_id, None) or self._attempt_that_never_began(group)
        for rollout in () if attempt.looked_at else group:
            if rollout.status is not Status.FAILED and _has_future_tokens(rollout, attempt):
                # Cancelled before the attempt could look at it.
                attempt.forgotten_tokens += self.buffer.forget_response(rollout, "retried")
                rollout.status = Status.ABORTED
        status = get_group_status(group)
        self._count(group, status, attempt)
        if status is Status.COMPLETED and not self._is_valid(group):
            for rollout in group:
                rollout.status = Status.FILTERED
            self.progress.windows[self.task_name].filtered += len(group)
            await self._discard(group, DiscardReason.FILTERED)
            self._runtime.failures.group_filtered(dotted_name(self._runtime.is_valid_sample))
            return False
        if status is Status.FAILED:
            reason = self._runtime.failures.reason(group)
            await self._discard(group, reason)
            self._runtime.failures.group_failed(group, reason)
            return False
        self._restart_interrupted(group, attempt)
        stored = self.buffer.put(
            group,
            self.task_name,
            model_step=attempt.model_step,
            current_train_step=self.consumer_step,
            stale_threshold=self._runtime.stale_rule,
        )
        if status is Status.COMPLETED:
            self._runtime.group_seconds.append(group[0].group_generate_time_s)
        if stored is Status.COMPLETED:
            self._runtime.failures.group_passed()
        elif status is Status.COMPLETED:
            self._runtime.failures.group_too_late()
        return stored is Status.COMPLETED

    # Inside.

    async def _play(self, group: Group, attempt: Attempt) -> Group:
        """Have the agent loop play what is not complete. What it raises or leaves undone belongs to the rollouts."""
        for rollout in group:
            if rollout.status is not Status.COMPLETED:
                rollout.status = Status.INIT
                if rollout.turns and not attempt.enable_partial_rollout and rollout.finish_reason is None:
                    attempt.forgotten_tokens += self.buffer.forget_response(rollout, "aborted")
        attempt.looked_at = False
        attempt.begun_with = {r.rollout_id: r.num_tokens for r in group if r.segments}
        message = ""
        try:
            group = await self.agent_loop.generate_group(group, enable_partial_rollout=attempt.enable_partial_rollout)
        except RunError:
            raise
        except Exception as error:
            message = f"{type(self.agent_loop).__name__} raised {type(error).__name__}: {error}"
        for rollout in group:
            if rollout.status is Status.INIT:
                rollout.fail(
                    Failure(FailureReason.AGENT_LOOP_ERROR, message or "the agent loop left the rollout unplayed")
                )
            elif rollout.status is Status.ABORTED and rollout.finish_reason is None and not self.should_abort():
                # Taken as an engine's failure: an engine that is paused by somebody else would be asked for ever.
                rollout.fail(Failure(FailureReason.ENGINE_ABORT, "interrupted although production is not paused", True))
            elif _has_future_tokens(rollout, attempt):
                message = f"tokens are ascribed to weights newer than {attempt.model_step}: {rollout.steps}"
                rollout.fail(Failure(FailureReason.ENGINE_NONSENSE, message, True))
        attempt.looked_at = True
        return group

    async def _prepare_retry(self, failed: list[RolloutState], attempt: Attempt) -> bool:
        """Forget the failed answers and wait out the backoff; False when a pause came first."""
        pause_s = max(self._runtime.failures.backoff_s(rollout) for rollout in failed)
        for rollout in failed:
            if rollout.error is not None and rollout.error.reason is FailureReason.UNJUDGED:
                # The answer is whole; only its judging is tried again.
                rollout.error = None
            else:
                attempt.forgotten_tokens += self.buffer.forget_response(rollout, "retried")
            rollout.status = Status.INIT
        if pause_s and not self.should_abort():
            try:
                async with asyncio.timeout(pause_s):
                    await self.update_event.wait()
            except TimeoutError:
                return True
        if self.should_abort():
            for rollout in failed:
                rollout.status = Status.ABORTED
            return False
        return True

    def _count(self, group: Group, status: Status, attempt: Attempt) -> None:
        """Count what this attempt finished. Raw rewards come before any filter."""
        window = self.progress.windows[self.task_name]
        if status is Status.COMPLETED:
            self.progress.finished_groups += 1
        window.produced_tokens += count_tokens(group) + attempt.forgotten_tokens - attempt.tokens_before
        for rollout in group:
            if rollout.rollout_id in attempt.kept:
                continue
            window.produced_rollouts += 1
            if rollout.status is Status.FAILED:
                window.failed += 1
            elif rollout.status is Status.COMPLETED and rollout.reward is not None:
                window.raw_reward_sum += rollout.reward.score
                window.raw_reward_count += 1

    def _is_valid(self, group: Group) -> bool:
        function = self._runtime.is_valid_sample
        try:
            return bool(function(group))
        except Exception as error:
            name = dotted_name(function)
            raise UserFunctionError(
                f"is_valid_sample_fn {name} raised {type(error).__name__}: {error} (task {self.task_name!r}, "
                f"group {group[0].group_id!r})"
            ) from error

    def _restart_interrupted(self, group: Group, attempt: Attempt) -> None:
        """Without partial rollout an interrupted rollout starts again, as often as it may."""
        if attempt.enable_partial_rollout:
            return
        for rollout in group:
            # An answer that is whole and only not judged yet is kept in any case.
            if rollout.status is Status.ABORTED and rollout.finish_reason is None:
                rollout.num_tries += 1
                self.buffer.forget_response(rollout, "aborted")
                if attempt.max_tries is not None and rollout.num_tries >= attempt.max_tries:
                    rollout.status = Status.MAX_TRIES

    async def _discard(self, group: Group, reason: DiscardReason) -> None:
        self.buffer.discard(group, self.task_name, reason, train_step=self.consumer_step)

    def _attempt_that_never_began(self, group: Group) -> Attempt:
        """For a group whose task was cancelled before its first step."""
        return Attempt(
            model_step=self.model_step,
            started_at=asyncio.get_running_loop().time(),
            group=group,
            tokens_before=count_tokens(group),
            kept=frozenset(rollout.rollout_id for rollout in group),
            enable_partial_rollout=True,
            max_tries=None,
            protected=False,
        )


def _has_future_tokens(rollout: RolloutState, attempt: Attempt) -> bool:
    """Whether a token of this attempt claims weights newer than those that were served."""
    steps = rollout.steps
    if not steps or max(steps)[0] <= attempt.model_step:
        return False
    end, begun_with = 0, attempt.begun_with.get(rollout.rollout_id, 0)
    for step, n in steps:
        end += n
        if step > attempt.model_step and end > begun_with:
            return True
    return False
