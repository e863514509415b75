"""How many threads to compute with beside others: as many as the machine has cores for, now.

A decode step is made of hundreds of small operations, and the threads of each wait for the last of them. Where another
process takes one of the cores, that one is asleep most of the time and the rest waits for it: a fifth of the speed,
where one thread less would have kept most of it. So the number follows what the machine gives: what the other
processes use of the cores, what its host steals, whether something waits for a core, and in the end the time of a
step with the new number against the old.

The same rule divides the cores between an engine and a trainer that work at once. Each has its share for certain and
takes what the other leaves idle: a trainer that waits lends its cores, and has them back when it goes on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

WINDOW_S = 0.3
"""From one look at the machine to the next, at least: it counts in hundredths of a second."""
STEPS = 3
"""That are timed with a new number before it is judged."""
WORSE = 1.1
"""How much longer a step must take for a new number to be taken back."""
PATIENCE_S = 3.0
"""Of steps that nothing is known to compare with: then a new number is taken back unjudged."""
WAITS = 0.3
"""Share of the time in which something waited for a core: then one thread less is tried, and timed."""
HOLD_S, LONGEST_HOLD_S = 5.0, 80.0
"""How long a number stays that was gone back to; twice as long every time."""


class Reading(NamedTuple):
    """Seconds, all of them since some beginning."""

    at: float
    busy: float
    """In which the cores that may be used were not idle, added up; stolen time too."""
    own: float
    """Processor time of this process."""
    waited: float = 0.0
    """In which something that could run waited for a core."""

    def without(self, begin: Reading, end: Reading) -> Reading:
        """This one, as if what passed from `begin` to `end` had not been."""
        return Reading(*(mine + last - first for mine, first, last in zip(self, begin, end, strict=True)))


class ThreadCount:
    """`count`, between `least` and `most`, follows what it is told. Asks nobody, so it can be tried on a recording."""

    def __init__(self, most: int, least: int = 1, *, cores: int | None = None) -> None:
        self.most, self.least = most, min(least, most)
        self.count = most
        self._cores = cores or available_cores()
        self._last: Reading | None = None
        self._timed = False
        """Whether anybody tells how long steps take."""
        self._times: dict[_Work, list[float]] = {}
        """Of the steps since the last look, or with the number that is being tried, by their work."""
        self._wish = most
        """What the last look asked for."""
        self._before: tuple[int, dict[_Work, float]] | None = None
        """While a number is tried: the one that was left, and how long steps took with it."""
        self._unlike_s = 0.0
        """While a number is tried: how long the steps took that cannot be compared."""
        self._hold_until, self._hold_s = 0.0, HOLD_S

    @classmethod
    def of(cls, threads: int, most: int | None = None, *, fixed: bool = False) -> ThreadCount:
        """At most `threads`; with `most` those are its for certain, and more while they are idle."""
        if fixed:
            return cls(threads, threads)
        return cls(threads) if most is None else cls(most, threads)

    @property
    def fixed(self) -> bool:
        return self.least == self.most

    @property
    def trying(self) -> bool:
        """Whether a new number is being timed."""
        return self._before is not None

    def rested(self, begin: Reading, end: Reading) -> None:
        """Between two steps it computed nothing: what the machine did then says nothing of the next one."""
        if self._last is not None:
            self._last = self._last.without(begin, end)

    def read(self, now: Reading) -> None:
        """What the machine did since the last time."""
        last = self._last
        if last is not None and now.at - last.at < WINDOW_S:
            return
        self._last = now
        if self.trying:
            return
        times, self._times = self._times, {}
        if last is None or self.fixed or now.at < self._hold_until:
            return
        passed = now.at - last.at
        others = max(0.0, (now.busy - last.busy - (now.own - last.own)) / passed)
        wish = min(self.most, max(self.least, math.floor(self._cores - others + 0.5)))
        if self._timed and wish == self.count and (now.waited - last.waited) / passed > WAITS:
            wish = max(self.least, self.count - 1)
        asked_before, self._wish = self._wish, wish
        if wish == self.count or (self._timed and (wish != asked_before or not times)):
            # Of one that is timed the steps since the last look must all be of the machine as it is now.
            return
        usual = {work: statistics.median(each) for work, each in times.items()}
        self._before = (self.count, usual) if usual else None
        self._unlike_s = 0.0
        self.count = wish

    def took(self, seconds: float, rows: int, kind: str = "") -> None:
        """One step with the present number, of so many rows: like is compared with like, of the same kind. Whoever
        never tells has every number that `read` finds at once."""
        self._timed = True
        work = _Work(kind, rows)
        if self._before is None:
            self._times.setdefault(_like(work, self._times) or work, []).append(seconds)
            return
        left, usual = self._before
        like = _like(work, usual)
        if like is None:
            self._unlike_s += seconds
            if self._unlike_s >= PATIENCE_S:
                self._give_up(left)
            return
        times = self._times.setdefault(like, [])
        times.append(seconds)
        if len(times) < STEPS:
            return
        if statistics.median(times) <= WORSE * usual[like]:
            self._before, self._times, self._hold_s = None, {}, HOLD_S
        else:
            self._give_up(left)

    def _give_up(self, left: int) -> None:
        """Go back to the number that was left, and stay with it for a while."""
        self._before, self._times, self.count = None, {}, left
        self._hold_until = (self._last.at if self._last is not None else 0.0) + self._hold_s
        self._hold_s = min(LONGEST_HOLD_S, 2 * self._hold_s)


class _Work(NamedTuple):
    kind: str
    rows: int


def _like(work: _Work, known: Iterable[_Work]) -> _Work | None:
    """Of what is known, that which it can be compared with."""
    return next(
        (one for one in known if one.kind == work.kind and 0.8 * one.rows <= work.rows <= 1.25 * one.rows), None
    )


def available_cores() -> int:
    return len(_allowed()) or os.cpu_count() or 1


def read_machine(stat: Path = Path("/proc/stat"), pressure: Path | None = None) -> Reading | None:
    """Now; None where the kernel does not tell. `pressure` is that of this process's own group."""
    try:
        lines = stat.read_text().splitlines()
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    names = {f"cpu{core}" for core in _allowed()}
    busy = 0
    for name, *numbers in (line.split() for line in lines if line.startswith("cpu")):
        if name in names:
            user, nice, system, _idle, _waits_for_disk, irq, softirq, steal, *_ = [*map(int, numbers), *[0] * 8]
            busy += user + nice + system + irq + softirq + steal
    return Reading(time.monotonic(), busy / ticks, time.process_time(), _waited(pressure or _pressure()))


@functools.cache
def _pressure() -> Path:
    """Of the group that this process is in (a container, a job), where the kernel tells it; else of the machine, of
    which it may have few cores."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, group = line.split(":", 2)
            found = Path("/sys/fs/cgroup") / group.lstrip("/") / "cpu.pressure"
            if number == "0" and found.is_file():
                return found
    return Path("/proc/pressure/cpu")


def _waited(pressure: Path) -> float:
    """`some avg10=0.00 avg60=0.00 avg300=0.00 total=12345`, in microseconds."""
    try:
        return int(pressure.read_text().splitlines()[0].rpartition("=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return 0.0


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
