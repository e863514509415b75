"""What is the same for every engine: requests that cannot be served, answers that need no model or cannot be true."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DataFailure, InfrastructureFailure
from penstock.ports import Completion, GenerateRequest
from penstock.rollout import FailureReason, FinishReason, unpack_ids

ABORTED = Completion(ids=b"", logprobs=b"", finish_reason=FinishReason.ABORT, steps=())
"""The answer of a paused engine to a request that a pause aborts."""
FULL = Completion(ids=b"", logprobs=b"", finish_reason=FinishReason.LENGTH, steps=())
"""The answer to a request that already has all the tokens it may have."""


def check_request(request: GenerateRequest, *, vocab_size: int, max_context: int) -> None:
    """Raises DataFailure for what an engine with this vocabulary and this context cannot serve."""
    prompt, given = unpack_ids(request.prompt_ids), unpack_ids(request.response_ids)
    name = f"request {request.request_id}"
    if not len(prompt):
        raise DataFailure(
            f"{name}: the prompt is empty; it needs at least one token", reason=FailureReason.EMPTY_PROMPT
        )
    length = len(prompt) + max(request.params.max_tokens, len(given))
    if length > max_context:
        raise DataFailure(
            f"{name}: {len(prompt)} prompt tokens and max_tokens {request.params.max_tokens} are {length}; "
            f"the context is {max_context}. Lower max_tokens or drop long prompts.",
            reason=FailureReason.CONTEXT_TOO_LONG,
        )
    for ids in (prompt, given, np.asarray(request.params.stop_token_ids, dtype=np.int64)):
        _check_vocabulary(name, ids, vocab_size)


def check_score(packed: bytes, *, vocab_size: int, max_context: int) -> None:
    """Raises DataFailure for tokens that an engine with this vocabulary and this context cannot score."""
    ids = unpack_ids(packed)
    if len(ids) > max_context:
        raise DataFailure(
            f"{len(ids)} tokens to score; the context is {max_context}", reason=FailureReason.CONTEXT_TOO_LONG
        )
    _check_vocabulary("tokens to score", ids, vocab_size)


def _check_vocabulary(name: str, ids: npt.NDArray[Any], vocab_size: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise DataFailure(
            f"{name}: ids go from {ids.min()} to {ids.max()}; the model knows 0 to {vocab_size - 1}",
            reason=FailureReason.TOKEN_OUTSIDE_VOCABULARY,
        )


def check_scores(scores: bytes, ids: bytes) -> None:
    """Raises InfrastructureFailure unless there is a finite logprob for every token but the first."""
    logprobs = np.frombuffer(scores, dtype=np.float32) if len(scores) % 4 == 0 else np.array([np.nan])
    if len(scores) != max(0, len(ids) - 4) or not np.isfinite(logprobs).all():
        raise InfrastructureFailure(
            f"engine scored {len(ids) // 4} tokens with {len(scores) // 4} logprobs, finite or not",
            reason=FailureReason.ENGINE_NONSENSE,
        )


def rest_of(completion: Completion, sent: int) -> Completion:
    """The last piece of a stream: the answer without its first `sent` tokens."""
    steps, left = [], sent
    for step, count in completion.steps:
        skipped = min(left, count)
        left -= skipped
        if count > skipped:
            steps.append((step, count - skipped))
    return Completion(
        ids=completion.ids[4 * sent :],
        logprobs=completion.logprobs[4 * sent :],
        finish_reason=completion.finish_reason,
        steps=tuple(steps),
    )
