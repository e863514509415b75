"""The threads that torch computes with, given back by whoever rests.

Every thread that calls torch gets a team of helper threads of its own (libgomp). A waiting helper spins for its next
piece of work, but only while a process has no more of them than cores; beyond that it sleeps at once and the kernel has
to wake it for every operation, which doubles the time of a step made of many small ones. So a thread that computed and
now rests (the engine while the trainer works, the trainer while the engine works) gives its team back.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.models.cores import WINDOW_S, Reading, ThreadCount, read_machine

_SOFT = 1


class Team:
    """The threads of whoever computes, as many as `wanted` says; for one thread that calls it again and again."""

    def __init__(self, wanted: ThreadCount, read: Callable[[], Reading | None] = read_machine) -> None:
        self._wanted = wanted
        self._read = read
        self._since_look = 0.0
        self._resting: Reading | None = None
        """What the machine had done when what was computed last was over."""

    @property
    def count(self) -> int:
        return self._wanted.count

    @property
    def trying(self) -> bool:
        """Whether a new number is being timed."""
        return self._wanted.trying

    def gather(self) -> None:
        """Before something is computed. What the machine did since a `rest` is passed over."""
        if self._resting is None:
            self._look()
        elif (now := self._read()) is not None:
            self._wanted.rested(self._resting, now)
        self._resting = None
        torch.set_num_threads(self._wanted.count)

    def rest(self) -> None:
        """Others compute now, until the next `gather`. The threads are given back."""
        if not self._wanted.fixed:
            self._resting = self._read()
        release_threads()

    def stepped(self, seconds: float, rows: int, kind: str = "") -> None:
        """After each of many steps: how long it took, with how many rows, and of which kind it was."""
        if self._wanted.fixed:
            return
        count = self._wanted.count
        self._wanted.took(seconds, rows, kind)
        self._since_look += seconds
        if self._since_look >= WINDOW_S:
            self._look()
        if self._wanted.count != count:
            torch.set_num_threads(self._wanted.count)

    def disband(self) -> None:
        """Nothing is computed any more."""
        release_threads()

    def _look(self) -> None:
        self._since_look = 0.0
        if not self._wanted.fixed and (reading := self._read()) is not None:
            self._wanted.read(reading)


class Pace:
    """Tells a team how long each of many like pieces of work takes, while they are done one after the other."""

    def __init__(self, team: Team, clock: Callable[[], float] = time.perf_counter) -> None:
        self._team = team
        self._clock = clock
        self._since = 0.0

    def begin(self) -> None:
        """The next piece begins."""
        self._since = self._clock()

    def piece(self, size: int, kind: str = "") -> None:
        """One has ended, and the next begins. `size` is how much work of its `kind` it was."""
        self._team.stepped(self._clock() - self._since, size, kind)
        self.begin()


def release_threads() -> None:
    """Give back the team of the calling thread. Its next operation makes a new one, in some microseconds."""
    _pause()(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int]:
    try:
        pause = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libgomp.so.1")).omp_pause_resource_all
    except (OSError, AttributeError):
        return lambda kind: 0  # Another OpenMP library, or none.
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    found: Callable[[int], int] = pause
    return found
