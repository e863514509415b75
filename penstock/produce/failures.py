"""What a failure costs: who may try again, what is written down, and when the run stops.

Retries are counted here alone, per rollout: infrastructure failures and data failures have budgets of their own. A
group whose rollout has used its budget is discarded with a reason and a dead-letter line. When too large a share of
the recent groups ends that way, or nothing ever passes the filter, the breaker stops the run.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec
import pydantic

from penstock.config import Config
from penstock.errors import CircuitOpen, StorageError
from penstock.replay import DiscardReason
from penstock.rollout import FailureReason, Group, RolloutState, Status

MAX_ANSWER = 4000
"""Characters of an answer that a dead letter keeps."""


class FailurePolicyConfig(Config):
    """How often what failed is tried again, and when the run gives up."""

    infrastructure_retries: int = pydantic.Field(default=3, ge=0, le=30)
    """How often a rollout is made again whose engine, worker process or deadline failed."""
    data_retries: int = pydantic.Field(default=1, ge=0, le=100)
    """How often a rollout is made again whose prompt, answer or judge is the cause."""
    backoff_s: float = pydantic.Field(default=0.5, ge=0)
    """Before the first infrastructure retry; doubles with each."""
    min_group_size: int | None = pydantic.Field(default=None, ge=1)
    """A rollout that stays unjudged leaves its group when this many are left; otherwise the group goes. None: K."""
    breaker_window: int = pydantic.Field(default=64, ge=1, le=10**6)
    """How many of the last finished groups the breaker looks at."""
    breaker_share: float = pydantic.Field(default=0.5, gt=0, le=1)
    """The run stops when more than this share of a full window failed."""
    max_filtered_in_a_row: int = pydantic.Field(default=1000, ge=1)
    """The run stops when this many groups in a row were filtered, or too stale as they finished, and none passed."""


class FailurePolicy:
    def __init__(self, config: FailurePolicyConfig, dead_letters: DeadLetters) -> None:
        self.config = config
        self.dead_letters = dead_letters
        self._recent: deque[bool] = deque(maxlen=config.breaker_window)
        self._unusable_in_a_row = 0
        self.last_failure = ""

    def may_retry(self, rollout: RolloutState) -> bool:
        """Charge one failed attempt to its budget; False when that is used up."""
        assert rollout.error is not None
        if rollout.error.infrastructure:
            rollout.infrastructure_failures += 1
            return rollout.infrastructure_failures <= self.config.infrastructure_retries
        rollout.data_failures += 1
        return rollout.data_failures <= self.config.data_retries

    def backoff_s(self, rollout: RolloutState) -> float:
        """How long to wait before this rollout is made again."""
        if rollout.error is None or not rollout.error.infrastructure:
            return 0.0
        return self.config.backoff_s * 2.0 ** (rollout.infrastructure_failures - 1)

    def may_leave(self, given_up: Group, group: Group) -> bool:
        """Whether the group can do without these: they only lack a verdict, and enough siblings are left."""
        unjudged = all(r.error is not None and r.error.reason is FailureReason.UNJUDGED for r in given_up)
        needed = self.config.min_group_size or len(group)
        return unjudged and len(group) - len(given_up) >= needed

    def reason(self, group: Group) -> DiscardReason:
        """Why a failed group is discarded: that of its first failed rollout."""
        failed = next(rollout for rollout in group if rollout.status is Status.FAILED)
        assert failed.error is not None
        if failed.error.reason is FailureReason.UNJUDGED:
            return DiscardReason.UNJUDGED
        return DiscardReason.RETRIES_EXHAUSTED if failed.error.infrastructure else DiscardReason.FAILED

    def group_failed(self, group: Group, reason: DiscardReason) -> None:
        """Write the dead letter and count towards the breaker. Raises CircuitOpen."""
        failed = next(rollout for rollout in group if rollout.status is Status.FAILED)
        self.last_failure = f"{failed.rollout_id}: {failed.error.message if failed.error else reason}"
        self.dead_letters.write(group, reason)
        self._recent.append(True)
        share = sum(self._recent) / len(self._recent)
        if len(self._recent) == self._recent.maxlen and share > self.config.breaker_share:
            raise CircuitOpen(
                f"{sum(self._recent)} of the last {len(self._recent)} groups failed (limit "
                f"{self.config.breaker_share:.0%}); the last: {self.last_failure}. "
                f"See {self.dead_letters.path or 'the dead letters'}; fix the cause and start again."
            )

    def group_passed(self) -> None:
        self._recent.append(False)
        self._unusable_in_a_row = 0

    def group_filtered(self, function: str) -> None:
        """Raises CircuitOpen when nothing passes any more."""
        self._unusable(
            f"the last was filtered by {function}; the task may be too easy or too hard for the model. "
            "Change the filter or the data."
        )

    def group_too_late(self) -> None:
        """A group finished and was too stale already. Raises CircuitOpen when all are."""
        self._unusable(
            "the last was too stale as it finished; the engines may serve older weights than were sent to them, or "
            "answers take longer than max_staleness allows."
        )

    def _unusable(self, why: str) -> None:
        self._recent.append(False)
        self._unusable_in_a_row += 1
        if self._unusable_in_a_row >= self.config.max_filtered_in_a_row:
            raise CircuitOpen(f"{self._unusable_in_a_row} finished groups in a row could not be used, {why}")


class DeadLetters:
    """One JSON line for each group that was given up: what was asked, what failed, why."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.count = 0

    def write(self, group: Group, reason: DiscardReason) -> None:
        self.count += 1
        if self.path is None:
            return
        letter = {
            "group_id": group[0].group_id,
            "task": group[0].task_name,
            "reason": reason,
            "messages": group[0].messages,
            "data_source": group[0].data_source,
            "failures": {r.rollout_id: r.error for r in group if r.error is not None},
            "answers": {r.rollout_id: r.response_text[:MAX_ANSWER] for r in group if r.response_text},
        }
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(letter, enc_hook=repr) + b"\n")
        except OSError as error:
            raise StorageError(f"dead letter could not be written to {self.path}: {error}") from error
