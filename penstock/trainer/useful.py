"""How much of the work that counts was lost to recovery: what was missing while it was done, and what was done in vain.

A lower bound of the useful time: an engine of forty that is missing counts as if nothing had worked meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

Span = tuple[float, float]


class Recovery:
    """Told what happens when it happens. What was lost and never came back is not counted: the run goes on without."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock
        self._missing: dict[str, float] = {}
        """What is missing, and since when."""
        self._gaps: list[Span] = []
        """In which something was missing that came back, or something was done in vain."""
        self._worked: list[Span] = []

    def lost(self, part: str) -> None:
        self._missing.setdefault(part, self.now())

    def back(self, part: str) -> None:
        if (since := self._missing.pop(part, None)) is not None:
            self._gaps.append((since, self.now()))

    def forget(self, part: str) -> None:
        """It is not waited for any more."""
        self._missing.pop(part, None)

    def in_vain(self, since: float) -> None:
        self._gaps.append((since, self.now()))

    def worked(self, since: float) -> None:
        """On what counts."""
        self._worked.append((since, self.now()))

    def settle(self, until: float) -> float:
        """Seconds of the work up to then that were lost to recovery. What may still change is left for the next time:
        from the first loss on that may yet be made good."""
        until = min([until, *self._missing.values()])
        gaps, work = list(_joined(self._gaps)), list(_joined(self._worked))
        lost = sum(max(0.0, min(gap[1], span[1], until) - max(gap[0], span[0])) for gap in gaps for span in work)
        self._gaps, self._worked = _after(gaps, until), _after(work, until)
        return lost


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """In order, and none of them in another."""
    last: Span | None = None
    for span in sorted(spans):
        if last is not None and span[0] <= last[1]:
            last = last[0], max(last[1], span[1])
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def _after(spans: Iterable[Span], moment: float) -> list[Span]:
    return [(max(span[0], moment), span[1]) for span in spans if span[1] > moment]
