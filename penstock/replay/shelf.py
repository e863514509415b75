"""The groups of one task that wait in one state, in replay order, with the next one to expire at hand.

Both heaps delete lazily: an item whose entry left, or came back with another expiry, is dropped when it surfaces.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator
from typing import Literal

import msgspec

from penstock.replay.codec import StoredGroup
from penstock.replay.lifecycle import GroupState
from penstock.replay.restore import HeldGroup
from penstock.replay.staleness import NEVER, UNMADE, ModelSteps, StaleRule
from penstock.rollout import Group, RolloutState, Status, get_group_status

Order = Literal["fifo", "stalest_first"]

_COMPLETED = Status.COMPLETED


@functools.lru_cache(maxsize=4096)
def _one(statuses: tuple[Status, ...]) -> tuple[Status, ...]:
    """One object for all groups whose rollouts stand alike: the garbage collector looks at each that is held."""
    return statuses


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
    statuses: tuple[Status, ...] = ()
    """Of its rollouts, when they were last looked at: nobody changes them while the group waits or is trained."""
    made: ModelSteps = UNMADE
    """Which weights made its tokens, when it was last stored."""
    state: GroupState | None = None
    rule: StaleRule | None = None
    expires_at: int = NEVER
    tokens: int = 0
    """Tokens counted as held. Below zero while a running group has dropped tokens that are not yet counted."""
    _wasted: dict[str, int] | None = None
    _moves: tuple[str | int, ...] = ()
    """The states it was in, and after each the train step."""

    @classmethod
    def drawn(cls, group: Group, sequence: int) -> Entry:
        first = group[0]
        entry = cls(first.group_id, first.task_name, sequence, first.draw)
        entry.hold(group)
        return entry

    @classmethod
    def restored(cls, held: HeldGroup) -> Entry:
        content = held.content
        entry = cls(content.group_id, content.task, held.sequence, content.draw, None, content, held.statuses)
        entry.made = held.made
        entry.tokens = held.tokens
        entry.enter(held.state, held.train_step)
        return entry

    def enter(self, state: GroupState, train_step: int) -> None:
        self.state = state
        self._moves += (state._value_, train_step)

    @property
    def story(self) -> str:
        """The states it was in, as `state@train step`."""
        moves = self._moves
        return " -> ".join(f"{state}@{step}" for state, step in zip(moves[::2], moves[1::2], strict=True))

    @property
    def group(self) -> Group:
        """Its rollouts; after a restart they stay bytes until someone looks."""
        if self._rollouts is None:
            assert self._stored is not None
            self._rollouts = tuple(self._stored.decode(self.statuses))
            self._stored = None
        return list(self._rollouts)

    def hold(self, group: Group) -> None:
        """These are its rollouts now, with the statuses that they have."""
        self._rollouts = tuple(group)
        self._stored = None
        self.look()

    def look(self) -> None:
        """The rollouts were played, or some expired: their statuses are others."""
        if self._rollouts is not None:
            self.statuses = _one(tuple([rollout.status for rollout in self._rollouts]))

    @property
    def status(self) -> Status:
        """The group's, as its rollouts have it. Raises ValueError when one was not played."""
        if self.statuses.count(_COMPLETED) == len(self.statuses):
            return _COMPLETED
        return get_group_status(self.group)

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
        for rollout in self._rollouts or ():
            if rollout.status is not Status.COMPLETED:
                rollout.status = Status.ABORTED
        self.statuses = tuple([s if s is Status.COMPLETED else Status.ABORTED for s in self.statuses])

    def first_expiry(self) -> int:
        """When the first of its rollouts that are not yet expired will be too stale."""
        assert self.rule is not None
        if Status.EXPIRED in self.statuses or Status.MAX_TRIES in self.statuses:
            return self.rule.first_expiry(self.group)
        return self.rule.limit(self.made.oldest, self.made.oldest_newest)


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


class Shelves:
    """A shelf for each task and state, made when it is first asked for."""

    def __init__(self, order: Order) -> None:
        self._order: Order = order
        self._shelves: dict[tuple[str, GroupState], Shelf] = {}

    def of(self, task: str, state: GroupState) -> Shelf:
        shelf = self._shelves.get((task, state))
        if shelf is None:
            shelf = self._shelves[task, state] = Shelf(self._order)
        return shelf

    def tasks(self) -> list[str]:
        return list({task for task, _ in self._shelves})
