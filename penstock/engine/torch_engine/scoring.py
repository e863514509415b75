"""Tokens to score, a part at a time between the steps, so that long ones hold nobody up."""

from __future__ import annotations

import asyncio

import numpy as np
import torch
from torch import Tensor

from penstock.engine.torch_engine.cache import Prefix
from penstock.engine.torch_engine.model import LanguageModel
from penstock.errors import InfrastructureFailure
from penstock.rollout import FailureReason, unpack_ids

PART = 64
"""Tokens scored between two steps: a table of so many rows as wide as the vocabulary."""


class Scoring:
    """One call of `score`. It is served whatever a pause does to others."""

    on_pause = "serve"

    def __init__(self, ids: bytes, answer: asyncio.Future[bytes]) -> None:
        self.answer = answer
        """Belongs to an event loop: only touched there."""
        self._ids = unpack_ids(ids)
        self._prefix: Prefix | None = None
        self._logprobs: list[Tensor] = []

    def advance(self, model: LanguageModel) -> bytes | InfrastructureFailure | None:
        """Score the next part; the outcome when that was the last."""
        ids = torch.from_numpy(self._ids.astype(np.int64)).to(model.device)
        if self._prefix is None:
            self._prefix = Prefix(ids[:-1], model.cache_layers, model.dtype)
        start = self._prefix.done
        self._logprobs.append(model.score(self._prefix, ids[start + 1 : start + 1 + PART]).cpu())
        if not self._prefix.ready:
            return None
        scores = torch.cat(self._logprobs).float().numpy()
        if not np.isfinite(scores).all():
            return InfrastructureFailure(
                "the logits of tokens to score are not finite; the weights are broken",
                reason=FailureReason.LOGITS_NOT_FINITE,
            )
        return scores.tobytes()

    def start_over(self) -> None:
        """The weights changed: all scores are of one set."""
        self._prefix = None
        self._logprobs.clear()
