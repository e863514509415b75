"""Rows of a decode step side by side, each part on a thread of its own.

An operation that is split among threads ends with its slowest: hundreds of times a step, and beside another process one
of them is always late. A row needs nothing of its neighbours, so a step can be split once instead: each thread takes
some of the rows through the whole model, and they meet at the end.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.models.threads import Team

FEWEST_ROWS = 16
"""Of a lane. Fewer use the processor badly: each lane reads all of the weights."""
STEPS = 3
"""That are timed one way before it is compared with the other."""
FIRST, AGAIN, SELDOM = 8, 64, 512
"""Steps from one comparison to the next: at first, then, and where the other way was worse time and again."""
BETTER, JUMPED = 0.95, 1.4
"""The other way is taken if a step takes at most this share of its time; it is tried at once when steps take so much
longer than the last ones did."""


class LaneChoice:
    """`split`: whether steps are split by rows. Both ways are timed now and then; the faster one stays.

    Which one that is depends on the rows, on the processor's caches and on who else is there. Asks nobody, so it can be
    tried on a recording.
    """

    def __init__(self) -> None:
        self.split = False
        self.trying = False
        self._rows = 0
        self._times: list[float] = []
        self._usual = 0.0
        """Of a step the present way, before the other was tried."""
        self._until, self._pause = FIRST, AGAIN

    def took(self, seconds: float, rows: int) -> None:
        """One step the present way."""
        self._until -= 1
        if not 0.8 * self._rows <= rows <= 1.25 * self._rows:
            # Another amount of work: nothing to compare with.
            self.split ^= self.trying
            self.trying, self._rows, self._times, self._usual = False, rows, [], 0.0
            self._until = min(self._until, FIRST)
        self._times = [*self._times[1 - STEPS :], seconds]
        if len(self._times) < STEPS:
            return
        now = statistics.median(self._times)
        if not self.trying:
            if self._until <= 0 or now > JUMPED * self._usual > 0:
                self.trying, self._times = True, []
                self.split = not self.split
            self._usual = now
            return
        self.trying, self._times = False, []
        if now <= BETTER * self._usual:
            self._usual, self._pause = now, AGAIN
        else:
            self.split = not self.split
            self._pause = min(SELDOM, 2 * self._pause)
        self._until = self._pause


class Lanes:
    """For one thread that calls `run` again and again; it takes the first part itself."""

    def __init__(self) -> None:
        self.count = 1
        """How many there may be."""
        self._pool: ThreadPoolExecutor | None = None

    def parts(self, rows: int) -> list[slice]:
        """Of so many rows, about as many for each lane."""
        lanes = max(1, min(self.count, rows // FEWEST_ROWS))
        ends = [rows * lane // lanes for lane in range(lanes + 1)]
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]

    def run(self, work: Callable[[slice], None], parts: list[slice]) -> None:
        """`work` of every part; returns, or raises what one of them raised, when all have ended."""
        if len(parts) == 1:
            work(parts[0])
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(thread_name_prefix="penstock-lane", initializer=_one_thread)
        threads = torch.get_num_threads()
        others = [self._pool.submit(_work_alone, work, part) for part in parts[1:]]
        torch.set_num_threads(1)
        try:
            work(parts[0])
        finally:
            torch.set_num_threads(threads)
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """The threads end. Idempotent; a later `run` has new ones."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class LaneTeam:
    """The threads of an engine: how many (`Team`), and whether they split operations or rows."""

    def __init__(self, team: Team, lanes: Lanes) -> None:
        self._team = team
        self._lanes = lanes
        self._choice = LaneChoice()

    def gather(self) -> None:
        self._team.gather()

    def stepped(self, seconds: float, rows: int) -> None:
        """After each of many steps: how long it took, and with how many rows. One thing is tried at a time."""
        if not self._choice.trying:
            self._team.stepped(seconds, rows)
        if not self._team.trying and self._team.count > 1:
            self._choice.took(seconds, rows)
        self._lanes.count = self._team.count if self._choice.split else 1

    def disband(self) -> None:
        """Nothing is computed any more."""
        self._lanes.close()
        self._team.disband()


def _one_thread() -> None:
    torch.set_num_threads(1)


def _work_alone(work: Callable[[slice], None], part: slice) -> None:
    with torch.inference_mode():  # which belongs to a thread
        work(part)
