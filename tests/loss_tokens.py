"""Tokens of a micro-batch to compute losses on, and gradients by finite differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.learn.losses import LossTokens

Array = np.ndarray[Any, np.dtype[np.float64]]


def make_tokens(
    logprobs: Array,
    old: Array,
    advantages: Array,
    answers: Array | None = None,
    *,
    engine: Array | None = None,
    reference: Array | None = None,
    proximal: Array | None = None,
    entropy: Array | None = None,
    on_policy: bool = False,
) -> LossTokens:
    """In float64; the engine's logprobs are the old ones unless they are given."""

    def column(values: Array) -> torch.Tensor:
        return torch.tensor(np.asarray(values, dtype=np.float64))

    current = column(logprobs).requires_grad_()
    return LossTokens(
        logprobs=current,
        engine_logprobs=column(old if engine is None else engine),
        old_logprobs=current.detach() if on_policy else column(old),
        advantages=column(advantages),
        answers=torch.tensor(np.zeros(len(logprobs)) if answers is None else answers).long(),
        on_policy=on_policy,
        whole_answers=True,
        proximal_logprobs=None if proximal is None else column(proximal),
        reference_logprobs=None if reference is None else column(reference),
        entropy=None if entropy is None else column(entropy),
    )


def random_tokens(seed: int, *, spread: float = 0.5, num_answers: int = 6) -> dict[str, Array]:
    """Answers of one to nine tokens, whose tokens lie between each other as those of several segments do; one answer
    whose advantage is 0, and two tokens whose ratio is absurd."""
    rng = np.random.default_rng(seed)
    answers = np.concatenate([np.full(rng.integers(1, 10), index) for index in range(num_answers)])
    answers = rng.permutation(answers)
    advantages = rng.normal(size=num_answers)
    advantages[0] = 0.0
    logprobs = -rng.exponential(size=len(answers))
    old = np.minimum(-1e-3, logprobs + spread * rng.normal(size=len(answers)))
    old[:2] = logprobs[:2] + np.asarray([-9.0, 0.0])
    logprobs[1] -= 9.0
    return {
        "logprobs": logprobs,
        "old": old,
        "advantages": advantages[answers],
        "answers": answers.astype(np.float64),
        "engine": old + 0.1 * rng.normal(size=len(answers)),
        "reference": np.minimum(-1e-3, logprobs + rng.normal(size=len(answers))),
    }


def gradient(loss: torch.Tensor, tokens: LossTokens) -> Array:
    [found] = torch.autograd.grad(loss.sum(), tokens.logprobs)
    return found.numpy()


def by_differences(total: Callable[[LossTokens], torch.Tensor], tokens: LossTokens, step: float = 1e-6) -> Array:
    """The gradient of `total` by each logprob, from its values alone."""
    base = tokens.logprobs.detach()
    found = []
    for place in range(len(base)):
        values = []
        for sign in (1, -1):
            moved = base.clone()
            moved[place] += sign * step
            values.append(total(replace(tokens, logprobs=moved)).sum().item())
        found.append((values[0] - values[1]) / (2 * step))
    return np.asarray(found)
