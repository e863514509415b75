"""The groups of one task that wait in one state, in replay order, with the next one to expire at hand.

Both heaps delete lazily: an item whose entry left, or came back with another expiry, is dropped when it surfaces.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

import msgspec

from penstock.replay.codec import StoredGroup
from penstock.replay.lifecycle import GroupState
from penstock.replay.restore import HeldGroup
from penstock.replay.staleness import NEVER, StaleRule
from penstock.rollout import Group, RolloutState, Status

Order = Literal["fifo", "stalest_first"]


class Entry(msgspec.Struct, gc=False):
    """A group in the buffer's care, from drawing until it is trained or discarded.

    Nothing here is looked at by the garbage collector, which would stop the event loop for the longer the more groups
    there are: a struct without it, and the rollouts as a tuple, which is left out when nothing in it can be in a cycle.
    """

    group_id: str
    task: str
    sequence: int
    """Insertion order; a group that returns keeps its place."""
    draw: int
    _rollouts: tuple[RolloutState, ...] | None = None
    _stored: StoredGroup | None = None
    _statuses: tuple[Status, ...] = ()
    state: GroupState | None = None
    rule: StaleRule | None = None
    expires_at: int = NEVER
    tokens: int = 0
    """Tokens counted as held. Below zero while a running group has dropped tokens that are not yet counted."""
    _wasted: dict[str, int] | None = None
    story: str = ""
    """The states it was in, as `state@train step`."""

    @classmethod
    def drawn(cls, group: Group, sequence: int) -> Entry:
        first = group[0]
        return cls(first.group_id, first.task_name, sequence, first.draw, tuple(group))

    @classmethod
    def restored(cls, held: HeldGroup) -> Entry:
        content = held.content
        entry = cls(content.group_id, content.task, held.sequence, content.draw, None, content, held.statuses)
        entry.tokens = held.tokens
        entry.enter(held.state, held.train_step)
        return entry

    def enter(self, state: GroupState, train_step: int) -> None:
        self.state = state
        self.story = f"{self.story} -> {state.value}@{train_step}" if self.story else f"{state.value}@{train_step}"

    @property
    def group(self) -> Group:
        """Its rollouts; after a restart they stay bytes until someone looks."""
        if self._rollouts is None:
            assert self._stored is not None
            self._rollouts = tuple(self._stored.decode(self._statuses))
            self._stored = None
        return list(self._rollouts)

    @group.setter
    def group(self, group: Group) -> None:
        self._rollouts = tuple(group)
        self._stored = None

    @property
    def statuses(self) -> tuple[Status, ...]:
        return self._statuses if self._rollouts is None else tuple([rollout.status for rollout in self._rollouts])

    def has_rollout(self, rollout_id: str) -> bool:
        return any(rollout.rollout_id == rollout_id for rollout in self.group)

    def waste(self, why: str, tokens: int) -> None:
        """These tokens were dropped; the next move records it."""
        self.tokens -= tokens
        self._wasted = self._wasted or {}
        self._wasted[why] = self._wasted.get(why, 0) + tokens

    def take_waste(self) -> tuple[tuple[str, int], ...]:
        """What was dropped since the last move."""
        taken, self._wasted = self._wasted, None
        return tuple(taken.items()) if taken else ()

    def interrupt(self) -> None:
        """A restart found the group running: all that is not complete is ABORTED."""
        if self._rollouts is None:
            self._statuses = tuple(s if s is Status.COMPLETED else Status.ABORTED for s in self._statuses)
            return
        for rollout in self._rollouts:
            if rollout.status is not Status.COMPLETED:
                rollout.status = Status.ABORTED

    def first_expiry(self, held: HeldGroup) -> int:
        """When the first of its rollouts will be too stale; from what the ledger says, if that is enough."""
        assert self.rule is not None
        if self._rollouts is not None or Status.EXPIRED in self._statuses:
            return self.rule.first_expiry(self.group)
        if held.oldest is None or held.oldest_newest is None:
            return NEVER
        return self.rule.limit(held.oldest, held.oldest_newest)


class Shelf:
    def __init__(self, order: Order) -> None:
        self._stalest_first = order == "stalest_first"
        self._entries: dict[int, Entry] = {}
        self._order: list[tuple[int, int]] = []
        self._expiry: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def add(self, entry: Entry) -> None:
        self._entries[entry.sequence] = entry
        heapq.heappush(self._order, (entry.expires_at if self._stalest_first else 0, entry.sequence))
        if entry.expires_at != NEVER:
            heapq.heappush(self._expiry, (entry.expires_at, entry.sequence))

    def remove(self, entry: Entry) -> None:
        del self._entries[entry.sequence]

    def pop_first(self) -> Entry:
        """The next one in replay order; IndexError when empty."""
        while True:
            key, sequence = heapq.heappop(self._order)
            entry = self._entries.get(sequence)
            if entry is not None and (not self._stalest_first or entry.expires_at == key):
                del self._entries[sequence]
                return entry

    def take_first(self, n: int) -> list[Entry]:
        return [self.pop_first() for _ in range(n)]

    def pop_expired(self, train_step: int) -> Iterator[Entry]:
        """Take out those that are too stale for `train_step`, the earliest to expire first."""
        while self._expiry and self._expiry[0][0] <= train_step:
            key, sequence = heapq.heappop(self._expiry)
            entry = self._entries.get(sequence)
            if entry is not None and entry.expires_at == key:
                del self._entries[sequence]
                yield entry
