"""CISPO: the ratio is a weight with a cap and without a gradient, so every token keeps its own."""

from __future__ import annotations

import functools

from pydantic import Field

from penstock.learn.losses.base import LossConfig, LossFunction, LossTerms, LossTokens


class CISPOLossConfig(LossConfig):
    """-sg(min(ratio, ratio_cap)) * A * log p for each token; one-sided: a small ratio is not raised."""

    ratio_cap: float = Field(default=5.0, gt=0, le=1e6)
    """The most a ratio weighs: the ratio itself, not its distance from 1."""

    def build(self) -> LossFunction:
        return functools.partial(cispo, config=self)


def cispo(tokens: LossTokens, config: CISPOLossConfig) -> LossTerms:
    ratio = tokens.log_ratio.detach().exp()
    loss = -ratio.clamp(max=config.ratio_cap) * tokens.advantages * tokens.logprobs
    return LossTerms(loss, {"clip_fraction_high": (ratio > config.ratio_cap).float()})
