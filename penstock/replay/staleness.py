"""Staleness, defined once.

A token made by weights m has, for train step t, the staleness t - m - 1: 0 means made by the weights just before t.
A rollout's staleness is that of its oldest token; time in the buffer counts, because t is the consumer's step.
With `sync_weights_interval` s and `max_staleness` in sync periods, a rollout is expired when

    staleness >= (max_staleness + 1) * s        the stale threshold

With `max_token_staleness`, tokens at or beyond their own threshold are masked out of the loss, and what counts is the
oldest token that is left; with none left the rollout is expired.
"""

from __future__ import annotations

import msgspec

from penstock.rollout import Group, RolloutState, Status, made_by

NEVER = 1 << 60
"""The train step at which something without tokens expires."""


def calculate_stale_threshold(max_staleness: int, sync_weights_interval: int) -> int:
    """The first staleness that is too much."""
    if max_staleness < 0:
        raise ValueError(f"max_staleness is {max_staleness}; it must be at least 0")
    if sync_weights_interval < 1:
        raise ValueError(f"sync_weights_interval is {sync_weights_interval}; it must be at least 1")
    return (max_staleness + 1) * sync_weights_interval


def calculate_seq_staleness(model_step: int, train_step: int) -> int:
    """Staleness for `train_step` of what weights `model_step` made.

    Never negative: a version not older than the consumer's step comes from a lineage lost at a restart.
    """
    return max(0, train_step - model_step - 1)


class ModelSteps(msgspec.Struct, frozen=True, gc=False):
    """Which weights made a group's tokens. The first two decide when the first of its rollouts expires."""

    oldest: int | None = None
    oldest_newest: int | None = None
    """The lowest of the rollouts' newest."""
    newest: int | None = None

    @classmethod
    def of(cls, group: Group) -> ModelSteps:
        made = made_by(group)
        if len(made) == 1:  # nearly always
            (step,) = made
            return cls(step, step, step)
        if not made:
            return UNMADE
        return cls(min(made), min([max(steps)[0] for rollout in group if (steps := rollout.steps)]), max(made))


UNMADE = ModelSteps()
"""Of a group without a token."""


class StaleRule(msgspec.Struct, frozen=True, gc=False):
    """When a task's rollouts expire, and what happens to them then."""

    stale_threshold: int
    token_stale_threshold: int | None = None
    discard_expired: bool = False

    def expires_at(self, rollout: RolloutState) -> int:
        """The first train step for which this rollout is too stale; NEVER without tokens of known origin."""
        steps = rollout.steps
        return self.limit(min(steps)[0], max(steps)[0]) if steps else NEVER

    def limit(self, oldest: int | None, newest: int | None) -> int:
        """The first train step for which tokens of these model steps are too stale; NEVER when there are none."""
        if oldest is None or newest is None:
            return NEVER
        if self.token_stale_threshold is not None and self.token_stale_threshold <= self.stale_threshold:
            # Older tokens are masked before they could expire the rollout, so its newest token decides.
            return newest + 1 + self.token_stale_threshold
        return oldest + 1 + self.stale_threshold

    def first_expiry(self, group: Group) -> int:
        """The step at which the next rollout of the group will be too stale, however late it is already."""
        live = (rollout for rollout in group if rollout.status in (Status.COMPLETED, Status.ABORTED))
        return min((self.expires_at(rollout) for rollout in live), default=NEVER)

    def mark_expired(self, group: Group, train_step: int) -> int:
        """Set the rollouts that are too stale to EXPIRED; returns the step at which the next one will be."""
        upcoming = NEVER
        for rollout in group:
            if rollout.status is Status.COMPLETED or rollout.status is Status.ABORTED:
                expires_at = self.expires_at(rollout)
                if expires_at <= train_step:
                    rollout.status = Status.EXPIRED
                elif expires_at < upcoming:
                    upcoming = expires_at
        return upcoming


def rollout_staleness(rollout: RolloutState, train_step: int) -> int:
    """Of its oldest token."""
    steps = rollout.steps
    return calculate_seq_staleness(min(steps)[0], train_step) if steps else 0


def group_staleness(group: Group, train_step: int) -> int:
    made = made_by(group)
    return calculate_seq_staleness(min(made), train_step) if made else 0
