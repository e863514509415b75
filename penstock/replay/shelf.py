"""The groups of one task that wait in one state, in replay order, with the next one to expire at hand.

Both heaps delete lazily: an item whose entry left, or came back with another expiry, is dropped when it surfaces.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from penstock.replay.lifecycle import GroupState
from penstock.replay.staleness import NEVER, StaleRule
from penstock.rollout import Group

Order = Literal["fifo", "stalest_first"]


class Entry:
    """A group in the buffer's care, from drawing until it is trained or discarded."""

    __slots__ = ("expires_at", "group", "group_id", "rule", "sequence", "state", "story", "task", "tokens")

    def __init__(self, group: Group, task: str, sequence: int) -> None:
        self.group = group
        self.group_id = group[0].group_id
        self.task = task
        self.sequence = sequence
        """Insertion order; a group that returns keeps its place."""
        self.state: GroupState | None = None
        self.rule: StaleRule | None = None
        self.expires_at = NEVER
        self.tokens = 0
        """Tokens counted as held. Below zero while a running group has dropped tokens that are not yet counted."""
        self.story: list[tuple[GroupState, int]] = []

    def tell(self) -> str:
        return " -> ".join(f"{state}@{step}" for state, step in self.story)


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

    def pop_expired(self, train_step: int) -> Iterator[Entry]:
        """Take out those that are too stale for `train_step`, the earliest to expire first."""
        while self._expiry and self._expiry[0][0] <= train_step:
            key, sequence = heapq.heappop(self._expiry)
            entry = self._entries.get(sequence)
            if entry is not None and entry.expires_at == key:
                del self._entries[sequence]
                yield entry
