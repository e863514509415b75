"""Attempt: one playing of a group, from the moment it is scheduled until it is stored.

It is made when the group is scheduled, its task returns it, and storing takes it: whoever holds the attempt holds all
that is known of the playing.
"""

from __future__ import annotations

import copy
from typing import Self

import msgspec

from penstock.rollout import Group, RolloutState, Status, made_by

NOBODY: frozenset[str] = frozenset()

_INIT = Status.INIT


class Attempt(msgspec.Struct, kw_only=True):
    group: Group
    model_step: int
    """The weights that were served as it began; fills missing token versions."""
    newest_step: int
    """No token can be of newer weights: those served, or, after a restart from an older checkpoint, those of the lost
    lineage that made what the group already has."""
    started_at: float
    kept: frozenset[str] = NOBODY
    """Rollouts that were complete before; this attempt does not count them again."""
    enable_partial_rollout: bool = True
    max_tries: int | None = None
    protected: bool = False
    """A pause waits for it: one of its rollouts was interrupted as often as allowed."""
    fresh: bool = False
    """Its group was just drawn: nothing of it was played before."""
    cut_off: bool = False
    """Its task was cancelled, so nobody has looked at what it has."""

    @classmethod
    def begin(
        cls,
        group: Group,
        *,
        model_step: int,
        started_at: float,
        enable_partial_rollout: bool = True,
        max_tries: int | None = None,
    ) -> Self:
        newest = model_step
        kept = []
        protected = False
        statuses = [rollout.status for rollout in group]
        fresh = statuses.count(_INIT) == len(statuses)  # nearly all are
        for rollout in () if fresh else group:
            if rollout.status is _INIT:
                continue
            newest = max([newest, *(step for step, _ in rollout.steps)])
            if rollout.status is Status.COMPLETED:
                kept.append(rollout.rollout_id)
            protected = protected or rollout.status is Status.MAX_TRIES
        return cls(
            group=group,
            model_step=model_step,
            newest_step=newest,
            started_at=started_at,
            kept=frozenset(kept) if kept else NOBODY,
            enable_partial_rollout=enable_partial_rollout,
            max_tries=max_tries,
            protected=protected,
            fresh=fresh,
        )

    @property
    def playing(self) -> list[str]:
        return [rollout.rollout_id for rollout in self.group if rollout.rollout_id not in self.kept]

    def of_the_future(self) -> Group:
        """Rollouts with a token that claims weights newer than those that were served."""
        if max(made_by(self.group), default=self.newest_step) <= self.newest_step:
            return []
        return [rollout for rollout in self.group if max(made_by([rollout]), default=0) > self.newest_step]

    def interrupted(self) -> Attempt:
        """A copy, out of reach of a task that may still run: what is not complete is ABORTED."""
        group = [copy.copy(rollout) for rollout in self.group]
        for rollout in group:
            if rollout.status is not Status.COMPLETED:
                rollout.status = Status.ABORTED
                rollout.error = None
        return msgspec.structs.replace(self, group=group, cut_off=True)


class PlayedGroup(list[RolloutState]):
    """A group as `generate_group` hands it out: a plain list that knows its attempt."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt.group)
        self.attempt = attempt
