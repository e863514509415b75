"""Off-policy correction between the engine, which sampled, and the trainer, in the words of verl.

Three policies: the engine's (behaviour), the trainer's at the beginning of the step (proximal), and the current one.

    decoupled   the loss compares current with proximal; the tokens are weighed by proximal / engine
    bypass      the loss compares current with the engine; that ratio is the correction, and no other is applied

With one update per step the proximal policy is the current one, detached, and costs nothing. With several, a decoupled
step computes it once before the first update.

A weight is truncated by one number (`rollout_is_threshold=2.0`, TIS) or banded by two (`"0.5_5.0"`, IcePop: 0 outside).
What is rejected counts 0 and stays in the denominator. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from penstock.config import Config, nearest
from penstock.learn.kl import ESTIMATORS
from penstock.learn.losses.base import MAX_LOG_RATIO, LossConfig, LossTokens

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
REJECTIONS = tuple(f"{level}_{kind}" for level in LEVELS for kind in ("k1", "k2", "k3"))

Band = tuple[float, float]

DEFAULT_THRESHOLD = 2.0
"""What a weight is truncated at where nobody says it."""


class CorrectionConfig(Config):
    """How tokens that another policy sampled are weighed and rejected. A preset's name stands for one: `tis`, ..."""

    bypass_mode: bool | None = None
    """True: the ratio is taken against the engine. False: against the trainer at the beginning of the step. None: the
    second where `rollout_is` asks for weights and for a step that is on-policy with one update, else the first."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh each token by trainer / engine: its own ratio, or the product over its answer."""
    rollout_is_threshold: float | str = DEFAULT_THRESHOLD
    """One number truncates the weight. Two, `low_high`, make it 0 outside. Only for `rollout_is`."""
    rollout_rs: str | None = None
    """What is rejected by, several with commas: `token_k1` (one token), `seq_sum_k1` (the answer, by the product of its
    ratios), `seq_mean_k1` (by their geometric mean), `seq_max_k1` (by its worst token), and the same with k2 and k3."""
    rollout_rs_threshold: float | str | None = None
    """One for each of `rollout_rs`, with commas. For k1 a band of the ratio, `low_high`; one number u stands for 1/u_u.
    For k2 and k3 the largest value."""
    off_policy_mask_threshold: float | None = Field(default=None, gt=0, le=1e3)
    """Drop an answer with a negative advantage whose mean log(engine / current) is above this (DeepSeek-V3.2)."""

    def problems(self) -> Iterator[str]:
        for name, read in (("rollout_is_threshold", self.weight_band), ("rollout_rs_threshold", self.rejections)):
            try:
                read()
            except ValueError as error:
                yield f"{name}: {error}"
        if self.rollout_is is None and self.rollout_is_threshold != DEFAULT_THRESHOLD:
            yield f"rollout_is_threshold is {self.rollout_is_threshold!r}, but rollout_is asks for no weights"
        if self.rollout_rs is None and self.rollout_rs_threshold is not None:
            yield f"rollout_rs_threshold is {self.rollout_rs_threshold!r}, but rollout_rs says not by what to reject"

    def needs_whole_answers(self) -> bool:
        by_answer = any(not reason.startswith("token") for reason in _parts(self.rollout_rs))
        return self.rollout_is == "sequence" or by_answer or self.off_policy_mask_threshold is not None

    def weight_band(self) -> Band | float:
        """What `rollout_is_threshold` says. Raises ValueError."""
        text = str(self.rollout_is_threshold)
        return _band(text) if "_" in text else _number(text)

    def rejections(self) -> dict[str, Band]:
        """Reason -> what is kept: a band of the ratio for k1, of the value for k2 and k3. Raises ValueError."""
        reasons = _parts(self.rollout_rs)
        given = "" if self.rollout_rs_threshold is None else str(self.rollout_rs_threshold)
        thresholds = _parts(given)
        unknown = [reason for reason in reasons if reason not in REJECTIONS]
        if unknown:
            raise ValueError(f"rollout_rs has {unknown[0]!r}.{nearest(unknown[0], list(REJECTIONS))}")
        if len(reasons) != len(thresholds):
            raise ValueError(f"it has {len(thresholds)} values ({given!r}) for {len(reasons)} of rollout_rs")
        return {reason: _kept(reason, threshold) for reason, threshold in zip(reasons, thresholds, strict=True)}


PRESETS: dict[str, CorrectionConfig] = {
    "none": CorrectionConfig(),
    "tis": CorrectionConfig(bypass_mode=False, rollout_is="token", rollout_is_threshold=2.0),
    "icepop": CorrectionConfig(bypass_mode=False, rollout_is="token", rollout_is_threshold="0.5_5.0"),
    "seq_tis": CorrectionConfig(bypass_mode=False, rollout_is="sequence", rollout_is_threshold=2.0),
    "seq_mis": CorrectionConfig(
        bypass_mode=False,
        rollout_is="sequence",
        rollout_is_threshold=2.0,
        rollout_rs="seq_sum_k1",
        rollout_rs_threshold="0.5_2.0",
    ),
    "geo_rs": CorrectionConfig(bypass_mode=False, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.99_1.01"),
    "decoupled": CorrectionConfig(bypass_mode=False, rollout_is="token", rollout_is_threshold=5.0),
    "bypass": CorrectionConfig(bypass_mode=True),
    "bypass_geo_rs": CorrectionConfig(bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.99_1.01"),
}
"""By name; `train.correction="tis"`."""


@dataclass(frozen=True)
class Correction:
    """What comes of it for each token of a micro-batch."""

    weights: Tensor
    """Importance weights times what is kept; without gradient."""
    shares: dict[str, Tensor] = field(default_factory=dict)
    """Which tokens were truncated, banded out and rejected, by reason."""


OldPolicy = Literal["current", "proximal", "engine"]


def old_policy(correction: CorrectionConfig, loss: LossConfig, *, on_policy: bool, num_updates: int) -> OldPolicy:
    """What the ratio of this step is taken against."""
    bypass = correction.bypass_mode
    if bypass is None:
        # Against the engine the ratio would be the weight, and the one that was asked for left out without a word.
        weighed = correction.rollout_is is not None and loss.uses_ratio
        bypass = not weighed and (loss.against_engine or not (on_policy and num_updates == 1))
    if bypass:
        return "engine"
    return "current" if num_updates == 1 else "proximal"


def correct(tokens: LossTokens, config: CorrectionConfig, *, weighs: bool) -> Correction:
    """Without `weighs` the loss's own ratio is the importance weight, and tokens are only rejected."""
    log_ratio = (tokens.trainer_logprobs - tokens.engine_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights, shares = log_ratio.new_ones(len(log_ratio)), {}
    if config.rollout_is is not None and weighs:
        of_answer = tokens.sum_over_answer(log_ratio) if config.rollout_is == "sequence" else log_ratio
        ratio = of_answer.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        band = config.weight_band()
        if isinstance(band, float):
            weights = ratio.clamp(max=band)
            shares["correction/truncated"] = (ratio > band).float()
        else:
            outside = (ratio < band[0]) | (ratio > band[1])
            weights = ratio.masked_fill(outside, 0.0)
            shares["correction/outside_band"] = outside.float()
    rejected = {
        f"rejected/{reason}": _rejected(tokens, log_ratio, reason, kept) for reason, kept in config.rejections().items()
    }
    if config.off_policy_mask_threshold is not None:
        drift = tokens.mean_over_answer(tokens.engine_logprobs - tokens.logprobs.detach())
        worse = tokens.mean_over_answer(tokens.advantages) < 0
        rejected["rejected/off_policy"] = (drift > config.off_policy_mask_threshold) & worse
    for name, dropped in rejected.items():
        weights = weights.masked_fill(dropped, 0.0)
        shares[name] = dropped.float()
    if len(rejected) > 1:
        shares["rejected/any"] = _any(list(rejected.values())).float()
    return Correction(weights, shares)


def _rejected(tokens: LossTokens, log_ratio: Tensor, reason: str, kept: Band) -> Tensor:
    level, kind = reason.rsplit("_", 1)
    low, high = kept
    if kind == "k1":
        low, high = (math.log(low) if low > 0 else -math.inf), math.log(high)
    values: Tensor = ESTIMATORS[kind](-log_ratio, type(log_ratio).exp) if kind != "k1" else log_ratio
    if level == "seq_max":
        outside = ((values < low) | (values > high)).to(log_ratio)
        return tokens.max_over_answer(outside) > 0
    if level == "seq_sum":
        values = tokens.sum_over_answer(values)
    elif level == "seq_mean":
        values = tokens.mean_over_answer(values)
    return (values < low) | (values > high)


def _any(masks: list[Any]) -> Any:
    found = masks[0]
    for mask in masks[1:]:
        found = found | mask
    return found


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def _kept(reason: str, threshold: str) -> Band:
    if not reason.endswith("k1"):
        return -math.inf, _number(threshold)
    if "_" in threshold:
        return _band(threshold)
    upper = _number(threshold)
    if upper <= 1:
        raise ValueError(f"{threshold} for {reason}; one number u keeps ratios from 1/u to u, so it must be above 1")
    return 1 / upper, upper


def _band(text: str) -> Band:
    low, _, high = text.partition("_")
    try:
        band = float(low), float(high)
    except ValueError:
        raise ValueError(f"{text!r} is not low_high, such as 0.5_5.0") from None
    if not (0 <= band[0] < band[1] < math.inf):
        raise ValueError(f"{text!r}: the low end must be at least 0 and below the high one")
    return band


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number, nor low_high") from None
    if not 0 < number < math.inf:
        raise ValueError(f"{text!r} must be above 0 and finite")
    return number
