"""The micro-batches of one rank, made in step with those of the others; a rank that cannot go on ends all of them.

Without sharding a rank makes its own, and all agree at the end whether each of them could. With sharding every pass
through the model is made by all ranks together: they agree before each, and whoever has no micro-batch left makes one
that counts nothing, until nobody has.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from penstock.learn.pack import MicroBatch
from penstock.learn.peers import Peers


class StopSign(Protocol):
    """A `threading.Event`, or anything that says the same."""

    def is_set(self) -> bool: ...


class Stopped(Exception):
    """A train step ended early because it was asked to."""


class PeerFailed(Exception):
    """Another rank could not go on; what it met is in its own answer."""


class Rounds:
    def __init__(self, peers: Peers, micro_batches: Sequence[MicroBatch], stopped: StopSign, *, together: bool) -> None:
        self._peers = peers
        self._waiting = deque(micro_batches)
        self._stopped = stopped
        self._together = together
        self.failure: Exception | None = None
        """What keeps this rank from going on; told to the others at the next agreement."""

    def __iter__(self) -> Iterator[MicroBatch | None]:
        """None is a turn that only the others need. Raises `failure`, PeerFailed or Stopped, on all ranks at once."""
        return self._all_together() if self._together else self._each_its_own()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """What is raised in here ends the round, not yet the rank; where passes are made together it must not wait."""
        try:
            yield
        except Exception as error:
            if self._together:
                raise
            self.failure = error

    def _each_its_own(self) -> Iterator[MicroBatch]:
        while self._waiting and not self._cannot_go_on():
            yield self._waiting.popleft()
        [failed] = self._peers.largest(self._cannot_go_on())
        if failed:
            raise self.failure or PeerFailed

    def _all_together(self) -> Iterator[MicroBatch | None]:
        while True:
            some_wait, failed = self._peers.largest(bool(self._waiting), self._cannot_go_on())
            if failed:
                raise self.failure or PeerFailed
            if not some_wait:
                return
            yield self._waiting.popleft() if self._waiting else None

    def _cannot_go_on(self) -> bool:
        if self.failure is None and self._stopped.is_set():
            self.failure = Stopped()
        return self.failure is not None
