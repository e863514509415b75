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
from penstock.produce.attempt import NOBODY, Attempt, PlayedGroup
from penstock.produce.failures import FailurePolicy
from penstock.produce.progress import ProduceProgress, Window
from penstock.replay import DiscardReason, GroupState, ReplayBuffer, Signal, StaleRule
from penstock.rollout import Failure, FailureReason, Group, RolloutState, Status, get_group_status

IsValidSample = Callable[[Group], bool]


class TaskRuntime(msgspec.Struct):
    """The parts of one task; they live as long as the manager."""

    name: str
    agent_loop: AgentLoop
    sampler: Sampler
    buffer: ReplayBuffer
    stale_rule: StaleRule
    is_valid_sample: IsValidSample
    failures: FailurePolicy
    replayable: bool = True
    """Whether its loop's rollouts can be cut off and played again from their record."""
    group_seconds: list[float] = []
    """Durations of the groups that completed since the last batch."""


class ProduceContext:
    """What a strategy may ask and do for one task, during one call of it."""

    def __init__(
        self,
        runtime: TaskRuntime,
        *,
        progress: ProduceProgress,
        task_batch_size: int,
        train_step: int,
        model_step: int,
        update_event: asyncio.Event,
        changed: Signal,
    ) -> None:
        """`changed` is notified when a group finishes, moves in the buffer, or the abort signal changes."""
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
        self.changed = changed
        self._runtime = runtime

    # What a strategy may ask.

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

    @property
    def replayable(self) -> bool:
        """Whether a pause may cut the task's groups off. Those of an agent outside go on over it."""
        return self._runtime.replayable

    # What a strategy may do.

    async def sample_group(self, group_status: Sequence[Status] = ()) -> Group:
        """A waiting group of one of these statuses, else a new one."""
        return await self.sampler.sample(self.task_name, group_status=group_status)

    async def generate_group(
        self, group: Group, *, enable_partial_rollout: bool = False, max_tries: int | None = None
    ) -> Group:
        """Play a group and stamp how long that took. What comes back is for `put_generated_group`.

        An interrupted group comes back with ABORTED rollouts, in the state the pause found them.
        """
        attempt = self.begin(group, enable_partial_rollout=enable_partial_rollout, max_tries=max_tries)
        return PlayedGroup(await self.play(attempt))

    async def put_generated_group(self, played: Group | Attempt, *, durable: bool = True) -> bool:
        """Store a played group, or discard it with a reason. True only if it is COMPLETED after the put.

        Returns when that is durable; with `durable=False` at once, for those who put several and flush once.
        """
        attempt = played if isinstance(played, Attempt) else self._attempt_at(played)
        group = attempt.group
        if attempt.cut_off:
            for rollout in attempt.of_the_future():
                self.buffer.forget_response(rollout, "retried")
                rollout.status = Status.ABORTED
        status = get_group_status(group)
        window = self.progress.windows[self.task_name]
        self._count_rollouts(attempt, status, window)
        generated = self.buffer.tokens.generated
        try:
            completed = self._store(attempt, status, window)
        finally:
            # As the buffer counts them: those of this attempt that are kept or were forgotten.
            window.produced_tokens += self.buffer.tokens.generated - generated
        if durable:
            await self.buffer.flush()
        return completed

    # Playing in two steps, for those who play many groups at once.

    def begin(self, group: Group, *, enable_partial_rollout: bool = False, max_tries: int | None = None) -> Attempt:
        """The attempt at a group, as it is scheduled."""
        return Attempt.begin(
            group,
            model_step=self.model_step,
            started_at=asyncio.get_running_loop().time(),
            # The finished turns of an agent outside are not asked again, whatever the strategy does with others.
            enable_partial_rollout=enable_partial_rollout or not self._runtime.replayable,
            max_tries=max_tries,
        )

    async def play(self, attempt: Attempt) -> Attempt:
        """Play its group; failed rollouts are made again within their budgets, their siblings are kept."""
        for rollout in () if attempt.fresh else attempt.group:
            if rollout.status is Status.EXPIRED:
                self.buffer.forget_response(rollout, "re_rolled")
        while failed := await self._play_once(attempt):
            given_up = [rollout for rollout in failed if not self._runtime.failures.may_retry(rollout)]
            if given_up and not self._runtime.failures.may_leave(given_up, attempt.group):
                break
            for rollout in given_up:
                self.buffer.forget_response(rollout, DiscardReason.UNJUDGED)
            attempt.group = [rollout for rollout in attempt.group if rollout not in given_up]
            again = [rollout for rollout in failed if rollout not in given_up]
            if again and not await self._prepare_retry(again):
                break
        seconds = asyncio.get_running_loop().time() - attempt.started_at
        for rollout in attempt.group:
            rollout.group_generate_time_s = seconds
        return attempt

    # Inside.

    def _attempt_at(self, group: Group) -> Attempt:
        """Which one played it; for a group that a strategy made by its own means, one that begins now."""
        if isinstance(group, PlayedGroup):
            group.attempt.group = list(group)
            return group.attempt
        attempt = self.begin(group, enable_partial_rollout=True)
        attempt.kept = NOBODY
        return attempt

    def _store(self, attempt: Attempt, status: Status, window: Window) -> bool:
        group, failures = attempt.group, self._runtime.failures
        if status is Status.COMPLETED and not self._is_valid(group):
            for rollout in group:
                rollout.status = Status.FILTERED
            window.filtered += len(group)
            self.buffer.discard(group, self.task_name, DiscardReason.FILTERED, train_step=self.consumer_step)
            failures.group_filtered(dotted_name(self._runtime.is_valid_sample))
            return False
        if status is Status.FAILED:
            reason = failures.reason(group)
            self.buffer.discard(group, self.task_name, reason, train_step=self.consumer_step)
            failures.group_failed(group, reason)
            return False
        if status is not Status.COMPLETED:
            self._restart_interrupted(attempt)
        stored = self.buffer.put(
            group,
            self.task_name,
            model_step=attempt.model_step,
            current_train_step=self.progress.next_consumer_step,
            stale_threshold=self._runtime.stale_rule,
        )
        if status is Status.COMPLETED:
            self._runtime.group_seconds.append(group[0].group_generate_time_s)
            if stored is Status.COMPLETED:
                failures.group_passed()
            else:
                failures.group_too_late()
        return stored is Status.COMPLETED

    async def _play_once(self, attempt: Attempt) -> Group:
        """Have the agent loop play what is not complete. What it raises or leaves undone belongs to the rollouts.

        Returns those that failed.
        """
        for rollout in () if attempt.fresh else attempt.group:
            if rollout.status is not Status.COMPLETED:
                rollout.status = Status.INIT
                if rollout.turns and not attempt.enable_partial_rollout and rollout.finish_reason is None:
                    self.buffer.forget_response(rollout, "aborted")
        attempt.fresh = False
        message = ""
        try:
            attempt.group = await self.agent_loop.generate_group(
                attempt.group, enable_partial_rollout=attempt.enable_partial_rollout
            )
        except RunError:
            raise
        except Exception as error:
            message = f"{type(self.agent_loop).__name__} raised {type(error).__name__}: {error}"
        group, completed = attempt.group, Status.COMPLETED
        undone = [rollout for rollout in group if rollout.status is not completed]
        if undone:
            self._end_undone(group, undone, message)
        # Also of one that failed: an answer without a verdict is kept, and only judged again.
        nonsense = attempt.of_the_future()
        for rollout in nonsense:
            message = f"tokens are ascribed to weights newer than {attempt.model_step}: {rollout.steps}"
            rollout.fail(Failure(FailureReason.ENGINE_NONSENSE, message, True))
        return [rollout for rollout in group if rollout.status is Status.FAILED] if undone or nonsense else []

    def _end_undone(self, group: Group, undone: list[RolloutState], message: str) -> None:
        """Rollouts that were left unplayed, or interrupted without a cause, are failures with a reason."""
        # With a relative judger, a whole answer without a verdict waits for siblings that are not whole.
        all_whole = all(r.finish_reason is not None and r.status is not Status.FAILED for r in group)
        paused = self.should_abort()
        for rollout in undone:
            if rollout.status is Status.INIT:
                rollout.fail(
                    Failure(FailureReason.AGENT_LOOP_ERROR, message or "the agent loop left the rollout unplayed")
                )
            elif rollout.status is Status.ABORTED and rollout.finish_reason is None and not paused:
                # Taken as an engine's failure: an engine that is paused by somebody else would be asked for ever.
                rollout.fail(Failure(FailureReason.ENGINE_ABORT, "interrupted although production is not paused", True))
            elif rollout.status is Status.ABORTED and all_whole and not paused:
                # As above: it would be judged for ever.
                rollout.fail(Failure(FailureReason.UNJUDGED, "judging was interrupted although nothing is paused"))

    async def _prepare_retry(self, failed: list[RolloutState]) -> bool:
        """Forget the failed answers and wait out the backoff; False when a pause came first."""
        pause_s = max(self._runtime.failures.backoff_s(rollout) for rollout in failed)
        for rollout in failed:
            if rollout.error is not None and rollout.error.reason is FailureReason.UNJUDGED:
                # The answer is whole; only its judging is tried again.
                rollout.error = None
            else:
                self.buffer.forget_response(rollout, "retried")
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

    def _count_rollouts(self, attempt: Attempt, status: Status, window: Window) -> None:
        """Count what this attempt finished. Raw rewards come before any filter."""
        if status is Status.COMPLETED:
            self.progress.finished_groups += 1
        kept = attempt.kept
        finished = [r for r in attempt.group if r.rollout_id not in kept] if kept else attempt.group
        completed = Status.COMPLETED
        scores = [r.reward.score for r in finished if r.reward is not None and r.status is completed]
        window.produced_rollouts += len(finished)
        window.raw_reward_sum += sum(scores)
        window.raw_reward_count += len(scores)
        if status is Status.FAILED:
            window.failed += sum(rollout.status is Status.FAILED for rollout in finished)

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

    def _restart_interrupted(self, attempt: Attempt) -> None:
        """Without partial rollout an interrupted rollout starts again, as often as it may."""
        if attempt.enable_partial_rollout:
            return
        for rollout in attempt.group:
            # An answer that is whole and only not judged yet is kept in any case.
            if rollout.status is Status.ABORTED and rollout.finish_reason is None:
                rollout.num_tries += 1
                self.buffer.forget_response(rollout, "aborted")
                if attempt.max_tries is not None and rollout.num_tries >= attempt.max_tries:
                    rollout.status = Status.MAX_TRIES
