"""What wants a person's attention, in words: what is wrong first, what could be tuned after it. Pure.

The page and the terminal say the same: both ask here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from penstock.trainer.history import History, Point

RECENT = 5
"""Steps that an alarm about shares looks at."""
STAGE_FLOOR_S = 10.0
STAGE_FACTOR = 6.0
CLOSED_BEFORE = 3
MAX_ABORTED, ABORTED_OF = 0.05, 100
MAX_EQUAL_GROUPS = 0.5
MAX_TRUNCATED = 0.25
MAX_WAIT = 0.3
MAX_TOO_STALE = 0.1
"""Of the groups that ended: the bound throws them away."""
MAX_MISMATCH_KL = 0.01
"""k3, mean over tokens. What is usual between an engine and a trainer of one precision is below a tenth of it."""

EXPIRED = "/discarded/expired"

Level = Literal["alarm", "tip"]


class Finding(msgspec.Struct, frozen=True):
    level: Level
    text: str


def findings(history: History, states: Mapping[str, int], now: float) -> list[Finding]:
    """Alarms before tips. `now` is in seconds since the run began, `states` counts groups."""
    recent = history.steps[-RECENT:]
    wrong = (*_slow_stages(history, now), *_broken(history, states), *_too_stale(recent))
    return [Finding("alarm", text) for text in wrong] + [Finding("tip", text) for text in _tips(recent)]


def _slow_stages(history: History, now: float) -> Iterator[str]:
    for span in history.open_spans:
        took = history.took(span.lane, span.stage)
        if len(took) < CLOSED_BEFORE:
            continue
        usual = statistics.median(took)
        if now - span.begin > max(STAGE_FACTOR * usual, STAGE_FLOOR_S):
            yield f"{span.stage} has taken {now - span.begin:.0f} s; it usually takes {usual:.1f} s"


def _broken(history: History, states: Mapping[str, int]) -> Iterator[str]:
    away = {name: seen for name, seen in history.engines.items() if seen.state not in ("active", "closed")}
    if history.ended is None:
        for name, seen in away.items():
            yield f"engine {name} is {seen.state}" + (f": {seen.reason}" if seen.reason else "")
    drawn = sum(states.values())
    aborted = states.get("aborted", 0) + states.get("max_tries", 0)
    if drawn >= ABORTED_OF and aborted > MAX_ABORTED * drawn:
        yield f"{aborted} of {drawn} groups were interrupted and wait to be played again"
    if not history.steps:
        return
    last = history.steps[-1].metrics
    if last.get("judger/unjudged", 0) > 0 and _rising(history.steps, "judger/unjudged"):
        yield f"the judge abstains: {last['judger/unjudged']:.0f} answers have no verdict"
    kl = last.get("train/mismatch/k3_kl", 0.0)
    if kl > MAX_MISMATCH_KL:
        yield (
            f"engine and trainer disagree about the answers: mismatch KL is {kl:.2g} (usual: below "
            f"{MAX_MISMATCH_KL / 10:g}); look at dtypes, temperature and staleness"
        )


def _too_stale(recent: list[Point]) -> Iterator[str]:
    """What the bound of the staleness throws away."""
    lost = sum(value for point in recent for name, value in point.metrics.items() if name.endswith(EXPIRED))
    ended = lost + sum(point.metrics.get("produce/groups", 0.0) for point in recent)
    if ended and lost > MAX_TOO_STALE * ended:
        share = f"{100 * lost / ended:.0f} %"
        moves = "sync more often, draw fewer ahead, or raise max_staleness"
        yield f"{share} of the groups became too stale to be trained: {moves}"
    masked = sum(point.metrics.get("staleness/masked_tokens", 0.0) for point in recent)
    trained = sum(point.metrics.get("train/tokens", 0.0) for point in recent)
    if masked > MAX_TOO_STALE * (masked + trained):
        share = f"{100 * masked / (masked + trained):.0f} %"
        yield f"{share} of the tokens in the batches are too stale to be trained: sync more often"


def _tips(recent: list[Point]) -> Iterator[str]:
    if len(recent) < CLOSED_BEFORE:
        return
    equal = _mean(recent, "reward/equal_group_share")
    if equal is not None and equal >= MAX_EQUAL_GROUPS:
        yield (
            f"{100 * equal:.0f} % of the groups have equal rewards and teach nothing: filter them "
            "(is_valid_sample_fn), or choose prompts that are neither solved nor hopeless"
        )
    cut = _mean(recent, "length/truncated_share")
    if cut is not None and cut >= MAX_TRUNCATED:
        yield f"{100 * cut:.0f} % of the answers were cut by max_tokens: raise it, or shape their reward"
    waits = _mean(recent, "share/trainer_wait")
    if waits is not None and waits > MAX_WAIT:
        yield f"the trainer waits {100 * waits:.0f} % of its time for rollouts: more engines, or more over-sampling"
    idle = _mean(recent, "share/engine_idle")
    if idle is not None and idle > MAX_WAIT:
        share = f"{100 * idle:.0f} %"
        yield f"the engines are idle {share} of the time: the trainer, or the staleness bound, holds them back"


def _mean(points: list[Point], name: str) -> float | None:
    values = [point.metrics[name] for point in points if name in point.metrics]
    return statistics.fmean(values) if values else None


def _rising(points: list[Point], name: str) -> bool:
    before = points[-RECENT - 1].metrics.get(name, 0.0) if len(points) > RECENT else 0.0
    return points[-1].metrics.get(name, 0.0) > before
