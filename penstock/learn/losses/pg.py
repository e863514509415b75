"""The plain policy gradient. Off-policy it needs importance weights: see `CorrectionConfig`."""

from __future__ import annotations

from typing import ClassVar

from penstock.learn.losses.base import LossConfig, LossFunction, LossTerms, LossTokens


class PGLossConfig(LossConfig):
    """-A * log p for each token."""

    uses_ratio: ClassVar[bool] = False

    def build(self) -> LossFunction:
        return policy_gradient


def policy_gradient(tokens: LossTokens) -> LossTerms:
    return LossTerms(-tokens.advantages * tokens.logprobs)
