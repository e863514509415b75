"""What is minimised: one function per loss, over the trained tokens of a micro-batch.

A loss answers with one number per token; how they are averaged is `answer_weights`, the same for every loss and over
the whole update, so that micro-batches change nothing but memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config import import_name, nearest
from penstock.errors import ConfigError
from penstock.learn.config import LossConfig

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossTokens:
    """Columns of one micro-batch, one entry per trained token."""

    logprobs: Tensor
    """Of the weights being trained; the only one with a gradient."""
    engine_logprobs: Tensor
    advantages: Tensor
    on_policy: bool
    """One update, on answers of the weights it starts from: then the old policy is the current one."""

    @property
    def old_logprobs(self) -> Tensor:
        return self.logprobs.detach() if self.on_policy else self.engine_logprobs

    def importance(self, cap: float) -> Tensor:
        """Trainer's probability over engine's, at most `cap`."""
        return (self.logprobs.detach() - self.engine_logprobs).exp().clamp(max=cap)


@dataclass(frozen=True)
class LossTerms:
    loss: Tensor
    """One per token."""
    shares: dict[str, Tensor] = field(default_factory=dict)
    """Metrics: one number per token, reported as their mean over the trained tokens."""


LossFunction = Callable[[LossTokens, LossConfig], LossTerms]


def ppo(tokens: LossTokens, config: LossConfig) -> LossTerms:
    """-min(ratio * A, clipped ratio * A), the ratio clipped to [1 - clip_low, 1 + clip_high].

    For A < 0 that minimum has no bound: one token that the trainer finds a hundred times as likely as the engine did
    would outweigh the whole batch. `ratio_cap` bounds it there (dual clip). A ratio is at most exp(20), where its
    gradient ends: an infinite one would make a gradient of 0 * infinity, also of a token that is clipped.
    """
    ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    if config.ratio_cap is not None:
        bound = -config.ratio_cap * tokens.advantages
        loss = torch.where(tokens.advantages < 0, torch.minimum(loss, bound), loss)
    shares = {
        "clip_fraction_low": ((ratio < 1 - config.clip_low) & (tokens.advantages < 0)).float(),
        "clip_fraction_high": ((ratio > 1 + config.clip_high) & (tokens.advantages > 0)).float(),
    }
    # Against the engine's logprobs the ratio is the importance weight already; twice would be wrong.
    if config.importance_cap is not None and tokens.on_policy:
        return _corrected(loss, shares, tokens, config.importance_cap)
    return LossTerms(loss, shares)


def policy_gradient(tokens: LossTokens, config: LossConfig) -> LossTerms:
    """-A * logprob."""
    loss = -tokens.advantages * tokens.logprobs
    if config.importance_cap is not None:
        return _corrected(loss, {}, tokens, config.importance_cap)
    return LossTerms(loss)


LOSSES: dict[str, LossFunction] = {"ppo": ppo, "policy_gradient": policy_gradient}


def get_loss(name: str) -> LossFunction:
    if name in LOSSES:
        return LOSSES[name]
    if "." in name or ":" in name:
        loss: LossFunction = import_name(name)
        return loss
    raise ConfigError(f"loss.name is {name!r}, which is not a loss.{nearest(name, list(LOSSES))}")


def answer_weights(num_trained: npt.NDArray[np.int64], config: LossConfig) -> npt.NDArray[np.float64]:
    """What each token of an answer counts in the loss, from the trained tokens of every answer of the update.

    An answer without trained tokens has no mean, so `sequence-mean` leaves it out; `constant` divides by all answers.
    """
    counts = num_trained.astype(np.float64)
    if config.aggregation == "token-mean":
        return np.full(len(counts), 1.0 / counts.sum())
    if config.aggregation == "sequence-mean":
        return 1.0 / (np.maximum(counts, 1.0) * np.count_nonzero(counts))
    if config.constant_length is None:
        raise ConfigError("loss.aggregation is 'constant'; it needs a constant_length")
    return np.full(len(counts), 1.0 / (len(counts) * config.constant_length))


class Mismatch:
    """How far the engine's logprobs are from the trainer's, over the tokens seen so far."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, trainer_logprobs: Tensor, engine_logprobs: Tensor) -> None:
        self._parts.append((trainer_logprobs.detach() - engine_logprobs).double())

    def metrics(self) -> dict[str, float]:
        """Mean and maximum of |difference|; k3 estimate of KL(engine, trainer); effective sample size as a share."""
        difference = torch.cat(self._parts)
        # Clamped so that one absurd token gives a large number and not an infinite one.
        log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        return {
            "mismatch/mean_abs": difference.abs().mean().item(),
            "mismatch/max_abs": difference.abs().max().item(),
            "mismatch/k3_kl": (ratio - 1 - log_ratio).mean().item(),
            "mismatch/ess": (ratio.sum().square() / (len(ratio) * ratio.square().sum())).item(),
        }


def _corrected(loss: Tensor, shares: dict[str, Tensor], tokens: LossTokens, cap: float) -> LossTerms:
    weight = tokens.importance(cap)
    return LossTerms(loss * weight, {**shares, "importance_capped_share": (weight >= cap).float()})
