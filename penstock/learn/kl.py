"""How far a policy is from a reference, estimated from the tokens that it sampled. Nothing here imports torch.

With d = log p - log reference at a sampled token (Schulman, "Approximating KL divergence"):

    k1    d                     right on average, of either sign
    k2    d^2 / 2               its gradient is that of the KL; its value is not quite
    k3    exp(-d) - 1 + d       right on average and never negative; its gradient is not quite that of the KL
    k3+   k3, with the gradient of k2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from penstock.config import Config
from penstock.learn.losses.base import MAX_LOG_RATIO
from penstock.rollout import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

Exp = Callable[[Any], Any]


class KLConfig(Config):
    """A penalty for leaving a reference model: in the loss, with a gradient, or in the reward, without."""

    coef: float = Field(gt=0, le=1e3)
    """What the KL is multiplied with."""
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """How the KL is estimated from sampled tokens; `k3+` has k3's value and k2's gradient."""
    place: Literal["loss", "reward"] = "loss"
    """In the reward it is taken from the score, summed over the trained tokens of an answer; an estimator of
    advantages that works by tokens takes each from its own token."""
    reference: str | None = None
    """A model as `model` names it. None: the model as it was before training; with LoRA that is the base under the
    adapter, which costs no memory."""


def k1(d: Any, exp: Exp) -> Any:
    return d


def k2(d: Any, exp: Exp) -> Any:
    return 0.5 * d * d


def k3(d: Any, exp: Exp) -> Any:
    return exp(-d) - 1 + d


ESTIMATORS: dict[str, Callable[[Any, Exp], Any]] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3}


def kl_of_tokens(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """One number per token, with a gradient."""
    d = (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    value: Tensor = ESTIMATORS[estimator](d, type(d).exp)
    if estimator != "k3+":
        return value
    through: Tensor = k2(d, type(d).exp)
    return value.detach() + through - through.detach()


def kl_of_sampled(logprobs: FloatArray, reference: FloatArray, estimator: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One number per token of a record, for the reward."""
    d = np.clip(logprobs.astype(np.float64) - reference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    value: np.ndarray[Any, np.dtype[np.float64]] = ESTIMATORS[estimator](d, np.exp)
    return value
