"""What a micro-batch adds to the loss: the loss of each token, weighed and rejected, plus KL, less the entropy bonus.

    weight * loss + kl.coef * KL(token) - entropy_coef * entropy(token)

The weight is that of `correction`; KL and entropy are of every trained token, whatever was rejected.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.config import defined_at, raised_at
from penstock.errors import UserFunctionError
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.correction import OldPolicy, correct
from penstock.learn.head import TokenLogprobs
from penstock.learn.kl import kl_of_tokens
from penstock.learn.losses import CustomLossConfig, LossTerms, LossTokens
from penstock.learn.pack import MicroBatch


class Objective:
    """Of a configuration; built once."""

    def __init__(self, config: TrainWorkerConfig) -> None:
        self._loss_config, self._correction, self._kl = config.loss, config.correction, config.kl
        self._loss = config.loss.build()
        self._custom = config.loss.imported() if isinstance(config.loss, CustomLossConfig) else None
        self.whole_answers = config.loss.needs_whole_answers() or config.correction.needs_whole_answers()
        """Whether all trained tokens of an answer must be in one micro-batch."""
        self.entropy_gradient = config.loss.entropy_coef > 0
        self.kl_in_loss = config.kl is not None and config.kl.place == "loss"
        self.follows_advantage = config.loss.follows_advantage() and not self.kl_in_loss and not self.entropy_gradient
        """Whether a token whose advantage is 0 has no gradient."""

    def tokens(
        self, micro_batch: MicroBatch, computed: TokenLogprobs, old: OldPolicy, *, train_step: int
    ) -> LossTokens:
        """The columns of a micro-batch beside its logprobs."""
        logprobs = computed.logprobs

        def column(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Tensor:
            return torch.from_numpy(values).to(logprobs)

        engine = column(micro_batch.engine_logprobs)
        proximal = None if micro_batch.proximal_logprobs is None else column(micro_batch.proximal_logprobs)
        reference = None if micro_batch.reference_logprobs is None else column(micro_batch.reference_logprobs)
        if old == "proximal" and proximal is None:
            raise ValueError("the ratio is to be taken against the weights before the step, which were not computed")
        olds = {"engine": engine, "current": logprobs.detach(), "proximal": proximal}
        _, answers = np.unique(micro_batch.answer_index, return_inverse=True)
        return LossTokens(
            logprobs=logprobs,
            engine_logprobs=engine,
            old_logprobs=olds[old],  # type: ignore[arg-type]
            advantages=column(micro_batch.advantages),
            answers=torch.from_numpy(answers).to(logprobs.device),
            on_policy=old == "current",
            whole_answers=self.whole_answers,
            proximal_logprobs=proximal,
            reference_logprobs=reference,
            entropy=computed.entropy,
            staleness=column(np.maximum(0, train_step - 1 - micro_batch.model_steps).astype(np.float32)),
        )

    def __call__(self, tokens: LossTokens, old: OldPolicy) -> LossTerms:
        """One number per token, and what is reported. Raises UserFunctionError for a custom loss that fails."""
        terms = self._loss(tokens) if self._custom is None else self._custom_terms(tokens)
        # Against the engine's logprobs the ratio is the importance weight already; twice would be wrong.
        weighs = not self._loss_config.uses_ratio or old != "engine"
        corrected = correct(tokens, self._correction, weighs=weighs)
        loss, shares = terms.loss * corrected.weights, {**terms.shares, **corrected.shares}
        if self._kl is not None and tokens.reference_logprobs is not None:
            kl = kl_of_tokens(tokens.logprobs, tokens.reference_logprobs, self._kl.estimator)
            shares["reference_kl"] = kl.detach()
            if self.kl_in_loss:
                loss = loss + self._kl.coef * kl
        if self.entropy_gradient and tokens.entropy is not None:
            loss = loss - self._loss_config.entropy_coef * tokens.entropy
        return LossTerms(loss, shares)

    def _custom_terms(self, tokens: LossTokens) -> LossTerms:
        function = self._custom
        assert function is not None
        name = self._loss_config.function  # type: ignore[attr-defined]
        try:
            terms = self._loss(tokens)
        except Exception as error:
            where = raised_at(error, function)
            raise UserFunctionError(f"loss {name} raised {type(error).__name__}: {error} ({where})") from error
        if not isinstance(terms, LossTerms):
            raise UserFunctionError(
                f"loss {name} returned a {type(terms).__name__}; it must return LossTerms ({defined_at(function)})"
            )
        wrong = {key: value for key, value in {"loss": terms.loss, **terms.shares}.items() if not _fits(value, tokens)}
        if wrong:
            raise UserFunctionError(
                f"loss {name}: {sorted(wrong)} must be tensors of {len(tokens.logprobs)} numbers "
                f"({defined_at(function)})"
            )
        return terms


def _fits(value: object, tokens: LossTokens) -> bool:
    return isinstance(value, Tensor) and value.shape == tokens.logprobs.shape
