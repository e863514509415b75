"""DPPO with total variation: a token counts until its probability has moved far enough to where it is pushed.

A ratio says little about how far a policy moved: a token of 1e-4 that becomes 3e-4 has a ratio of 3 and changes
nothing, one of 0.9 that becomes 0.6 has a ratio of 0.67 and changes everything. |p - p_old| says it.
"""

from __future__ import annotations

import functools
from typing import ClassVar

from pydantic import Field

from penstock.learn.losses.base import LossConfig, LossFunction, LossTerms, LossTokens


class DPPOLossConfig(LossConfig):
    """-ratio * A + kl_coef * log(ratio)^2; the first term is 0 for a token that has moved far enough already."""

    against_engine: ClassVar[bool] = True
    mask_low: float = Field(default=0.2, gt=0, le=1)
    """A token with A < 0 counts until p - p_old is below -mask_low."""
    mask_high: float = Field(default=0.2, gt=0, le=1)
    """A token with A > 0 counts until p - p_old is above mask_high."""
    kl_coef: float = Field(default=1e-3, ge=0, le=1e3)
    """Of log(ratio)^2, which every token has, masked or not."""

    def follows_advantage(self) -> bool:
        return self.kl_coef == 0

    def build(self) -> LossFunction:
        return functools.partial(dppo, config=self)


def dppo(tokens: LossTokens, config: DPPOLossConfig) -> LossTerms:
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    moved = tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()
    low, high = (moved < -config.mask_low) & (advantages < 0), (moved > config.mask_high) & (advantages > 0)
    loss = (-log_ratio.exp() * advantages).masked_fill(low | high, 0.0) + config.kl_coef * log_ratio.square()
    return LossTerms(loss, {"clip_fraction_low": low.float(), "clip_fraction_high": high.float()})
