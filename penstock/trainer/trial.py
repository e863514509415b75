"""A custom loss or advantage is tried on a tiny made-up batch when the configuration is checked.

A plain bug costs a second then, and not a model that was loaded and a batch that was made. torch is imported only when
there is a custom loss to try.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.config import defined_at, dotted_name, import_name, raised_at
from penstock.errors import ConfigError, UserFunctionError
from penstock.learn import CustomLossConfig, TrainWorkerConfig
from penstock.learn.advantages import ESTIMATORS, AnswerTokens, Scored, estimate


def custom_function_problems(train: TrainWorkerConfig, *, group_sizes: list[int]) -> Iterator[str]:
    """Why the custom functions of this configuration cannot work; what is no function is found elsewhere.

    `group_sizes` are those that the estimator will meet.
    """
    if train.advantage not in ESTIMATORS and (estimator := _function(train.advantage)) is not None:
        yield from _advantage_problems(train.advantage, estimator, group_sizes)
    if isinstance(train.loss, CustomLossConfig) and (loss := _function(train.loss.function)) is not None:
        yield from _loss_problems(loss, train.loss)


def _function(name: str) -> Callable[..., Any] | None:
    if not ("." in name or ":" in name):
        return None
    with contextlib.suppress(ConfigError):
        found = import_name(name)
        return found if callable(found) else None
    return None


def _advantage_problems(name: str, function: Callable[..., Any], group_sizes: list[int]) -> Iterator[str]:
    """Groups of each size whose scores differ, and one of equal scores."""
    scores = [[float(i % 2) for i in range(size)] for size in group_sizes] + [[1.0] * group_sizes[0]]
    tokens = [[_made_up_tokens(score, 1 + place) for place, score in enumerate(group)] for group in scores]
    lengths = [[len(answer.mask) for answer in group] for group in tokens]
    try:
        estimate(name, Scored(scores, lengths, tokens))
    except UserFunctionError as error:
        yield f"train.advantage: {dotted_name(function)} fails on a made-up batch: {error}"


def _made_up_tokens(score: float, length: int) -> AnswerTokens:
    rewards = np.zeros(length)
    rewards[-1] = score
    ids = np.arange(length, dtype=np.int32)
    mask, logprobs = np.ones(length, np.uint8), np.full(length, -0.5, np.float32)
    return AnswerTokens(ids=ids, logprobs=logprobs, mask=mask, model_steps=np.zeros_like(ids), rewards=rewards)


def _loss_problems(function: Callable[..., Any], config: CustomLossConfig) -> Iterator[str]:
    for on_policy in (True, False):
        if (problem := _loss_problem(function, config, on_policy)) is not None:
            yield f"train.loss: {dotted_name(function)} fails on a made-up batch of 6 tokens: {problem}"
            return


def _loss_problem(function: Callable[..., Any], config: CustomLossConfig, on_policy: bool) -> str | None:
    import torch

    from penstock.learn.losses import LossTerms, LossTokens

    logprobs = torch.tensor([-0.1, -0.7, -2.0, -0.3, -1.1, -5.0], requires_grad=True)
    engine = logprobs.detach() + 0.01
    tokens = LossTokens(
        logprobs=logprobs,
        engine_logprobs=engine,
        old_logprobs=logprobs.detach() if on_policy else engine,
        advantages=torch.tensor([1.0, 1.0, 0.5, -1.0, -0.5, 0.0]),
        answers=torch.tensor([0, 0, 0, 1, 1, 1]),
        on_policy=on_policy,
        whole_answers=config.whole_answers,
        reference_logprobs=engine,
        entropy=torch.full((6,), 0.5),
        staleness=torch.zeros(6),
    )
    at = defined_at(function)
    try:
        terms = function(tokens, config)
    except Exception as error:
        return f"it raised {type(error).__name__}: {error} ({raised_at(error, function)})"
    if not isinstance(terms, LossTerms):
        return f"it returned a {type(terms).__name__}; it must return LossTerms ({at})"
    for name, value in {"loss": terms.loss, **terms.shares}.items():
        if not isinstance(value, torch.Tensor) or value.shape != logprobs.shape:
            found = f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is {value!r}"
            return f"{name} must be a tensor of one number per token, of shape (6,); it {found} ({at})"
        if not torch.isfinite(value).all():
            return f"{name} is not finite: {[round(number, 4) for number in value.tolist()]} ({at})"
    if not terms.loss.requires_grad:
        return f"its loss does not depend on tokens.logprobs, so that nothing would be learnt ({at})"
    try:
        (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs, allow_unused=True)
    except RuntimeError as error:
        return f"its gradient cannot be computed: {error} ({at})"
    if gradient is None or not torch.isfinite(gradient).all():
        shown = "there is none" if gradient is None else [round(number, 4) for number in gradient.tolist()]
        return f"the gradient of tokens.logprobs is not finite: {shown} ({at})"
    return None
