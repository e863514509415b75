"""PPO's clipped surrogate, per token, with bounds of its own for each side, and dual clip."""

from __future__ import annotations

import functools

from pydantic import Field

from penstock.learn.losses.base import LossConfig, LossFunction, LossTerms, LossTokens


class PPOLossConfig(LossConfig):
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) for each token."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the ratio of a token with a negative advantage counts."""
    clip_high: float = Field(default=0.2, gt=0, le=1e6)
    """A higher one than `clip_low` lets rare tokens grow (DAPO's clip-higher: 0.28)."""
    ratio_cap: float | None = Field(default=3.0, gt=1, le=1e6)
    """Dual clip: the most a token with a negative advantage counts, as a multiple of that advantage. None: no bound."""

    def build(self) -> LossFunction:
        return functools.partial(ppo, config=self)


def ppo(tokens: LossTokens, config: PPOLossConfig) -> LossTerms:
    """For A < 0 the minimum has no bound: one token that the trainer finds a hundred times as likely as the engine did
    would outweigh the whole batch. `ratio_cap` bounds it there."""
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -(ratio * advantages).minimum(clipped * advantages)
    shares = {
        "clip_fraction_low": ((ratio < 1 - config.clip_low) & (advantages < 0)).float(),
        "clip_fraction_high": ((ratio > 1 + config.clip_high) & (advantages > 0)).float(),
    }
    if config.ratio_cap is not None:
        bound = -config.ratio_cap * advantages
        shares["clip_fraction_dual"] = ((ratio > config.ratio_cap) & (advantages < 0)).float()
        loss = loss.minimum(bound).where(advantages < 0, loss)
    return LossTerms(loss, shares)
