"""What became of the groups and tokens of a run so far, in words, from the metrics of its steps. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

_DISCARDED = re.compile(r"produce/.+/discarded/([^/]+)")
_WAITING = re.compile(r"produce/.+/leftover/([^/]+)")
_SHARES = {"share/trainer_wait": "trainer waits", "share/engine_idle": "engines idle"}
_WAITS_AS = {"completed": "ready", "aborted": "interrupted", "expired": "too stale", "max_tries": "for a tail batch"}


class Flow(NamedTuple):
    trained: float = 0.0
    generated: float = 0.0
    wasted: float = 0.0
    discarded: Mapping[str, float] = {}
    waiting: Mapping[str, float] = {}
    """After the last step."""

    def after(self, metrics: Mapping[str, float]) -> Flow:
        """With one step more."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return Flow(
            self.trained + finite.get("produce/groups", 0.0),
            self.generated + finite.get("tokens/generated", 0.0),
            self.wasted + finite.get("tokens/wasted", 0.0),
            _summed(_DISCARDED, finite, self.discarded),
            _summed(_WAITING, finite, {}),
        )

    @property
    def states(self) -> dict[str, int]:
        """Groups by what became of them, as `alarms.py` counts them."""
        named = {state: self.waiting.get(word, 0.0) for state, word in _WAITS_AS.items()}
        named |= {"trained": self.trained, "discarded": sum(self.discarded.values())}
        return {state: int(count) for state, count in named.items()}

    def group_words(self) -> list[str]:
        """`144 trained`, `103 discarded (filtered 103)`, `2 wait (ready 2)`; nothing before the first step."""
        words = [f"{self.trained:.0f} trained"] if self.trained else []
        return words + [
            f"{sum(counts.values()):.0f} {verb} ({', '.join(f'{name} {count:.0f}' for name, count in counts.items())})"
            for verb, counts in (("discarded", self.discarded), ("wait", self.waiting))
            if counts
        ]

    def pipe_words(self, last: Mapping[str, float]) -> list[str]:
        """`trainer waits 31 %`, `engines idle 44 %` in the last step, `12 % of all tokens wasted` so far."""
        words = [
            f"{text} {100 * last[name]:.0f} %"
            for name, text in _SHARES.items()
            if math.isfinite(last.get(name, math.nan))
        ]
        if self.wasted and self.generated:
            words.append(f"{100 * self.wasted / self.generated:.0f} % of all tokens wasted")
        return words


def _summed(pattern: re.Pattern[str], metrics: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """By the last word of the names that fit, the most first; what is 0 is left out."""
    sums = Counter(before)
    for name, value in metrics.items():
        if value and (found := pattern.fullmatch(name)):
            word = found.group(1)
            sums[_WAITS_AS.get(word, word.replace("_", " "))] += value  # type: ignore[assignment]
    return dict(sums.most_common())
