"""Scores to advantages, one small function per estimator.

An estimator sees the scores of every group of the batch, because some normalise over all of them, and answers in the
same shape. A group whose scores are all equal says nothing about which answer is better: it gets exactly 0, not the
rounding noise of its mean divided by a tiny deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.config import import_name, nearest
from penstock.errors import ConfigError, RunError, UserFunctionError

Scores = list[list[float]]
Estimator = Callable[[Scores], Scores]

EPS = 1e-6
"""Added to a standard deviation before dividing by it."""


def grpo(scores: Scores) -> Scores:
    """(score - mean) / (sample standard deviation + eps), within the group."""
    return [_scaled(_centred(group)) for group in scores]


def dr_grpo(scores: Scores) -> Scores:
    """score - mean: hard and easy prompts are not blown up by a small deviation."""
    return [_centred(group) for group in scores]


def rloo(scores: Scores) -> Scores:
    """score - mean of the others, which is (score - mean) * K / (K - 1)."""
    return [[c * len(group) / (len(group) - 1) for c in _centred(group)] for group in scores]


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def get_estimator(name: str) -> Estimator:
    """By its registered name, or by the dotted path of a function of the same signature."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if "." in name or ":" in name:
        estimator: Estimator = import_name(name)
        return estimator
    raise ConfigError(f"advantage is {name!r}, which is not an estimator.{nearest(name, list(ESTIMATORS))}")


def estimate(name: str, scores: Scores) -> Scores:
    """One finite advantage per score. Raises RunError; UserFunctionError when the estimator is the user's."""
    estimator = get_estimator(name)
    kind = RunError if name in ESTIMATORS else UserFunctionError
    where = f"advantage {name}, groups of {sorted({len(group) for group in scores})}"
    try:
        advantages = [[float(value) for value in row] for row in estimator(scores)]
    except Exception as error:
        raise kind(f"{where}: {type(error).__name__}: {error}") from error
    if [len(row) for row in advantages] != [len(row) for row in scores]:
        raise kind(f"{where}: the estimator did not answer with one number per score")
    wrong = [value for row in advantages for value in row if not math.isfinite(value)]
    if wrong:
        raise kind(f"{where}: {len(wrong)} advantages are not finite, the first is {wrong[0]}")
    return advantages


def all_equal(group: list[float]) -> bool:
    return min(group) == max(group)


def _centred(group: list[float]) -> list[float]:
    if len(group) < 2:
        raise ValueError(f"a group of {len(group)} has no relative advantage; prompt_repeat_k must be at least 2")
    if all_equal(group):
        return [0.0] * len(group)
    mean = math.fsum(group) / len(group)
    return [score - mean for score in group]


def _scaled(centred: list[float]) -> list[float]:
    deviation = math.sqrt(math.fsum(c * c for c in centred) / (len(centred) - 1))
    return [c / (deviation + EPS) for c in centred]
