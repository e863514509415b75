"""How far two policies are from each other at the tokens that were sampled: the engine and the trainer above all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from penstock.learn.losses.base import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


class Mismatch(msgspec.Struct, kw_only=True):
    """Sums over tokens: those of several ranks add up."""

    tokens: int = 0
    total: float = 0.0
    """Of log(trainer / engine)."""
    absolute: float = 0.0
    largest: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = 0.0

    def add(self, trainer_logprobs: Tensor, engine_logprobs: Tensor) -> None:
        if not len(trainer_logprobs):
            return
        difference = (trainer_logprobs.detach() - engine_logprobs).double()
        # Clamped so that one absurd token gives a large number and not an infinite one.
        log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        self.tokens += len(difference)
        self.total += difference.sum().item()
        self.absolute += difference.abs().sum().item()
        self.largest = max(self.largest, difference.abs().max().item())
        self.k3 += (ratio - 1 - log_ratio).sum().item()
        self.ratio += ratio.sum().item()
        self.ratio_squared += ratio.square().sum().item()
        self.ratio_min = min(self.ratio_min, ratio.min().item())
        self.ratio_max = max(self.ratio_max, ratio.max().item())

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            tokens=self.tokens + other.tokens,
            total=self.total + other.total,
            absolute=self.absolute + other.absolute,
            largest=max(self.largest, other.largest),
            k3=self.k3 + other.k3,
            ratio=self.ratio + other.ratio,
            ratio_squared=self.ratio_squared + other.ratio_squared,
            ratio_min=min(self.ratio_min, other.ratio_min),
            ratio_max=max(self.ratio_max, other.ratio_max),
        )

    def metrics(self) -> dict[str, float]:
        """Mean and maximum of |difference|; KL(engine, trainer) by k1 and by k3; the smallest and the largest ratio of
        trainer to engine; the effective sample size as a share."""
        return {
            "mismatch/mean_abs": self.absolute / self.tokens,
            "mismatch/max_abs": self.largest,
            "mismatch/kl": -self.total / self.tokens,
            "mismatch/k3_kl": self.k3 / self.tokens,
            "mismatch/ratio_min": self.ratio_min,
            "mismatch/ratio_max": self.ratio_max,
            "mismatch/ess": self.ratio**2 / (self.tokens * self.ratio_squared),
        }

    def extremes(self) -> dict[str, float]:
        """Of the ratio of a policy to the one that it is compared with in the loss, and their KL by k1."""
        if not self.tokens:
            return {}
        return {"ratio/min": self.ratio_min, "ratio/max": self.ratio_max, "ratio/kl": -self.total / self.tokens}
