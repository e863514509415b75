"""Scores to advantages, one small function per estimator.

An estimator sees every group of the batch, because some normalise over all of them. It asks for what it needs by the
names of its parameters:

    scores    [group][rollout]: one finite number each
    lengths   [group][rollout]: how many tokens the model wrote
    tokens    [group][rollout]: an `AnswerTokens`, with the reward of each token

and answers in the same shape, with one number per rollout or one per token of it. A group whose scores are all equal
says nothing about which answer is better: it gets exactly 0, not the rounding noise of its mean divided by a tiny
deviation.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config import defined_at, import_name, nearest, raised_at
from penstock.errors import ConfigError, RunError, UserFunctionError
from penstock.rollout import FloatArray, IntArray, MaskArray

Scores = list[list[float]]
Lengths = list[list[int]]
DoubleArray = npt.NDArray[np.float64]
Estimator = Callable[..., Sequence[Sequence[Any]]]

EPS = 1e-6
"""Added to a standard deviation before dividing by it, and the least that is divided by."""


@dataclass(frozen=True, eq=False)
class AnswerTokens:
    """The tokens of one rollout, over its segments in their order."""

    ids: IntArray
    logprobs: FloatArray
    """As the engine recorded them."""
    mask: MaskArray
    """1 where the model wrote the token, 0 for text of tools."""
    model_steps: IntArray
    rewards: DoubleArray
    """The score at the last token that the model wrote, less what a KL in the reward takes from each token."""


Tokens = list[list[AnswerTokens]]


@dataclass(frozen=True, eq=False)
class Scored:
    """What estimators may ask for."""

    scores: Scores
    lengths: Lengths
    tokens: Tokens


def grpo(scores: Scores) -> Scores:
    """(score - mean) / (sample standard deviation + eps), within the group."""
    return [_scaled(_centred(group)) for group in scores]


def dr_grpo(scores: Scores) -> Scores:
    """score - mean: hard and easy prompts are not blown up by a small deviation."""
    return [_centred(group) for group in scores]


def rloo(scores: Scores) -> Scores:
    """score - mean of the others, which is (score - mean) * K / (K - 1)."""
    return [[c * len(group) / (len(group) - 1) for c in _centred(group)] for group in scores]


def opo(scores: Scores, lengths: Lengths) -> Scores:
    """score - the group's mean score weighed by length, the baseline of least variance for gradients that grow so."""
    return [_less_weighted_mean(*pair) for pair in zip(scores, lengths, strict=True)]


def pass_at_k(scores: Scores) -> Scores:
    """Only the best of a group has one: its lead over the second best."""
    return [_lead_of_the_best(group) for group in scores]


def maxrl(scores: Scores) -> Scores:
    """(score - mean) / mean: a prompt that is solved one time in a hundred counts as much as one solved always.

    Raises ValueError for a score below 0: the mean is a rate of success.
    """
    return [_over_the_mean(group) for group in scores]


def reinforce_plus_plus(scores: Scores, tokens: Tokens, *, gamma: float = 1.0) -> list[list[DoubleArray]]:
    """The return of each token, whitened over all tokens of the batch that the model wrote.

    What comes after text of tools reaches what comes before it; that text itself does not discount.
    """
    returns = [[_returns(answer, gamma) for answer in group] for group in tokens]
    return _whitened(returns, tokens)


def reinforce_plus_plus_baseline(scores: Scores, tokens: Tokens) -> list[list[DoubleArray]]:
    """score - mean of the group, whitened over all tokens of the batch that the model wrote."""
    centred = [_centred(group) for group in scores]
    spread = [
        [np.full(len(answer.mask), value) for value, answer in zip(*pair, strict=True)]
        for pair in zip(centred, tokens, strict=True)
    ]
    return _whitened(spread, tokens)


def nothing(scores: Scores) -> Scores:
    """0 for every answer: all there is to learn comes from elsewhere, such as a teacher."""
    return [[0.0] * len(group) for group in scores]


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "pass_at_k": pass_at_k,
    "maxrl": maxrl,
    "none": nothing,
}
COMPARES_SIBLINGS = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "pass_at_k", "maxrl"})
"""Estimators that give a group of one no advantage."""
DISCOUNTS = frozenset({"reinforce_plus_plus"})
RATES = frozenset({"maxrl"})
"""Estimators that take a group's mean score for a rate of success: no score may be below 0."""


def get_estimator(name: str) -> Estimator:
    """By its registered name, or by the dotted path of a function."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if "." in name or ":" in name:
        estimator: Estimator = import_name(name)
        return estimator
    raise ConfigError(f"advantage is {name!r}, which is not an estimator.{nearest(name, list(ESTIMATORS))}")


def estimate(name: str, scored: Scored, *, gamma: float = 1.0) -> list[list[DoubleArray]]:
    """One finite advantage per token. Raises RunError; UserFunctionError when the estimator is the user's."""
    estimator = get_estimator(name)
    kind = RunError if name in ESTIMATORS else UserFunctionError
    scores = scored.scores
    where = f"advantage {name} ({defined_at(estimator)}), groups of {sorted({len(group) for group in scores})}"
    try:
        answered = [list(row) for row in estimator(scores, **_asked(estimator, scored, gamma))]
        if [len(row) for row in answered] != [len(row) for row in scores]:
            raise kind(f"{where}: the estimator did not answer with one number per score")
        advantages = [
            [_per_token(value, len(answer.mask)) for value, answer in zip(*pair, strict=True)]
            for pair in zip(answered, scored.tokens, strict=True)
        ]
    except RunError:
        raise
    except Exception as error:
        raise kind(f"{where}: {type(error).__name__}: {error} ({raised_at(error, estimator)})") from error
    wrong = [values[~np.isfinite(values)][0] for row in advantages for values in row if not np.isfinite(values).all()]
    if wrong:
        raise kind(f"{where}: {len(wrong)} advantages are not finite, the first is {wrong[0]}")
    return advantages


def all_equal(group: list[float]) -> bool:
    return min(group) == max(group)


def _asked(estimator: Estimator, scored: Scored, gamma: float) -> dict[str, Any]:
    """What its parameters name, after the first: that one is the scores, whatever it is called."""
    offered = {"lengths": scored.lengths, "tokens": scored.tokens, "gamma": gamma}
    return {name: offered[name] for name in list(inspect.signature(estimator).parameters)[1:] if name in offered}


def _per_token(value: Any, num_tokens: int) -> DoubleArray:
    values = np.asarray(value, dtype=np.float64)
    if values.ndim == 0:
        return np.full(num_tokens, float(values))
    if values.shape != (num_tokens,):
        raise ValueError(f"{values.shape} advantages for an answer of {num_tokens} tokens")
    return values


def _centred(group: list[float]) -> list[float]:
    _require_siblings(group)
    if all_equal(group):
        return [0.0] * len(group)
    mean = math.fsum(group) / len(group)
    return [score - mean for score in group]


def _require_siblings(group: list[float]) -> None:
    if len(group) < 2:
        raise ValueError(f"a group of {len(group)} has no relative advantage; prompt_repeat_k must be at least 2")


def _scaled(centred: list[float]) -> list[float]:
    deviation = math.sqrt(math.fsum(c * c for c in centred) / (len(centred) - 1))
    return [c / (deviation + EPS) for c in centred]


def _less_weighted_mean(group: list[float], lengths: list[int]) -> list[float]:
    _require_siblings(group)
    if all_equal(group) or not any(lengths):
        return [0.0] * len(group)
    total = sum(lengths)
    baseline = math.fsum(score * length / total for score, length in zip(group, lengths, strict=True))
    return [score - baseline for score in group]


def _lead_of_the_best(group: list[float]) -> list[float]:
    _require_siblings(group)
    second, best = sorted(group)[-2:]
    return [best - second if score == best else 0.0 for score in group]


def _over_the_mean(group: list[float]) -> list[float]:
    if min(group) < 0:
        raise ValueError(f"a score is {min(group)}; maxrl divides by the mean score and needs scores of at least 0")
    centred = _centred(group)
    mean = math.fsum(group) / len(group)
    return [c / max(mean, EPS) for c in centred]


def _returns(answer: AnswerTokens, gamma: float) -> DoubleArray:
    returns = np.zeros(len(answer.mask))
    following = 0.0
    for place in np.flatnonzero(answer.mask)[::-1]:
        following = answer.rewards[place] + gamma * following
        returns[place] = following
    return returns


def _whitened(values: list[list[DoubleArray]], tokens: Tokens) -> list[list[DoubleArray]]:
    written = np.concatenate(
        [v[answer.mask == 1] for pair in zip(values, tokens, strict=True) for v, answer in zip(*pair, strict=True)]
    )
    if len(written) < 2 or written.min() == written.max():
        return [[np.zeros(len(v)) for v in group] for group in values]
    mean, deviation = written.mean(), written.std(ddof=1)
    return [[(v - mean) / (deviation + EPS) for v in group] for group in values]
