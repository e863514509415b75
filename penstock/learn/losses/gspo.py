"""GSPO: the ratio is that of a whole answer, so an answer is clipped or not, never a single token."""

from __future__ import annotations

import functools
from typing import Literal

from pydantic import Field

from penstock.learn.losses.base import LossConfig, LossFunction, LossTerms, LossTokens


class GSPOLossConfig(LossConfig):
    """-min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A) with s = exp(mean log-ratio of the answer)."""

    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """How far below 1 the ratio of an answer with a negative advantage counts."""
    clip_high: float = Field(default=4e-4, gt=0, le=1e6)
    """How far above 1 that of one with a positive advantage counts."""
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = "sequence-mean"

    def needs_whole_answers(self) -> bool:
        return True

    def build(self) -> LossFunction:
        return functools.partial(gspo, config=self)


def gspo(tokens: LossTokens, config: GSPOLossConfig) -> LossTerms:
    """s has its gradient through every token of the answer: as a factor, sg(s) * p / sg(p), it is each token's own, so
    that tokens may have advantages of their own."""
    mean = tokens.mean_over_answer(tokens.log_ratio.detach())
    ratio = (mean + tokens.logprobs - tokens.logprobs.detach()).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -(ratio * tokens.advantages).minimum(clipped * tokens.advantages)
    shares = {
        "clip_fraction_low": ((ratio < 1 - config.clip_low) & (tokens.advantages < 0)).float(),
        "clip_fraction_high": ((ratio > 1 + config.clip_high) & (tokens.advantages > 0)).float(),
    }
    return LossTerms(loss, shares)
