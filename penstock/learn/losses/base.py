"""What losses have in common: their configuration, the tokens they get, and what they answer.

A loss answers with one number per token. How they are averaged is `answer_weights`, the same for every loss and over
the whole update, so that micro-batches change nothing but memory. Importance weights, rejection, KL and entropy are
not the loss's business: `learn/objective.py` adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from penstock.config import Config
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Where a ratio ends, and its gradient with it: an infinite one would make a gradient of 0 * infinity."""


class LossConfig(Config):
    """What every loss has: how its tokens become one number. The base of `PPOLossConfig` and the others."""

    uses_ratio: ClassVar[bool] = True
    """Whether the loss weighs a token by current / old probability. Where the old one is the engine's, that is the
    importance weight already, and a second one would be wrong."""
    against_engine: ClassVar[bool] = False
    """Whether the loss is defined against the policy that sampled, also where a step is on-policy."""
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    """How token losses become one: each token counts the same (DAPO), each answer counts the same, or (Dr.GRPO) the sum
    over an answer divided by `constant_length`, then the mean over answers."""
    constant_length: int | None = Field(default=None, ge=1, le=10**9)
    """What `constant` divides by, the longest answer that is possible; None with the others."""
    entropy_coef: float = Field(default=0.0, ge=0, le=10)
    """The bonus for entropy: this times the mean entropy of the tokens is taken from the loss."""

    def __init__(self, **values: Any) -> None:
        if type(self) is LossConfig:
            raise ConfigError(
                "LossConfig is what the losses have in common; give PPOLossConfig, GSPOLossConfig, CISPOLossConfig, "
                "DPPOLossConfig, PGLossConfig, or CustomLossConfig(function='package.module.function')"
            )
        super().__init__(**values)

    def problems(self) -> Iterator[str]:
        if (self.aggregation == "constant") != (self.constant_length is not None):
            yield (
                f"aggregation is {self.aggregation!r} and constant_length is {self.constant_length}; "
                "'constant' needs a constant_length (the longest answer), the others take none"
            )

    def needs_whole_answers(self) -> bool:
        """Whether all trained tokens of an answer must be in one micro-batch."""
        return False

    def follows_advantage(self) -> bool:
        """Whether a token whose advantage is 0 has no gradient."""
        return True

    def build(self) -> LossFunction:
        raise NotImplementedError


@dataclass(frozen=True)
class LossTokens:
    """Columns of one micro-batch, one entry per trained token."""

    logprobs: Tensor
    """Of the weights being trained; the only one with a gradient, beside the entropy."""
    engine_logprobs: Tensor
    """As the engine recorded them when it sampled."""
    old_logprobs: Tensor
    """What the ratio is taken against: those of the current weights, detached, when the step is on-policy with one
    update; else the engine's, or those of the weights at the beginning of the step (decoupled)."""
    advantages: Tensor
    answers: Tensor
    """Which answer of the micro-batch the token belongs to, from 0."""
    on_policy: bool
    """The old policy is the current one: every ratio is 1."""
    whole_answers: bool = False
    """Whether every answer of the micro-batch is here with all its trained tokens."""
    proximal_logprobs: Tensor | None = None
    """Of the weights at the beginning of the step, where they were computed again."""
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    staleness: Tensor | None = None

    @property
    def trainer_logprobs(self) -> Tensor:
        """Of the weights at the beginning of the step, as far as they are known; else of the current ones. Detached."""
        return self.logprobs.detach() if self.proximal_logprobs is None else self.proximal_logprobs

    @property
    def log_ratio(self) -> Tensor:
        """log(current / old), bounded."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sum_over_answer(self, values: Tensor) -> Tensor:
        """For each token the sum over all trained tokens of its answer."""
        return self._sums(values)[self.answers]

    def mean_over_answer(self, values: Tensor) -> Tensor:
        return (self._sums(values) / self._sums(values.new_ones(len(values))).clamp(min=1))[self.answers]

    def max_over_answer(self, values: Tensor) -> Tensor:
        self._require_whole()
        return values.new_zeros(self._num_answers).scatter_reduce(0, self.answers, values, "amax", include_self=False)[
            self.answers
        ]

    def _sums(self, values: Tensor) -> Tensor:
        self._require_whole()
        return values.new_zeros(self._num_answers).index_add(0, self.answers, values)

    @property
    def _num_answers(self) -> int:
        return int(self.answers.max()) + 1 if len(self.answers) else 0

    def _require_whole(self) -> None:
        if not self.whole_answers:
            raise ValueError(
                "an answer may be split over micro-batches here; CustomLossConfig(whole_answers=True) keeps it whole"
            )


@dataclass(frozen=True)
class LossTerms:
    """What a loss answers."""

    loss: Tensor
    """One per token."""
    shares: dict[str, Tensor] = field(default_factory=dict)
    """Metrics: one number per token, reported as their mean over the trained tokens."""


LossFunction = Callable[[LossTokens], LossTerms]
