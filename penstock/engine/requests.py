"""What is the same for every engine about a request: which cannot be served, and the answers that need no model."""

from __future__ import annotations

import numpy as np

from penstock.errors import DataFailure
from penstock.ports import Completion, GenerateRequest
from penstock.rollout import FailureReason, FinishReason, unpack_ids

ABORTED = Completion(ids=b"", logprobs=b"", finish_reason=FinishReason.ABORT, steps=())
"""The answer of an engine that is paused in mode abort."""
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
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise DataFailure(
                f"{name}: ids go from {ids.min()} to {ids.max()}; the model knows 0 to {vocab_size - 1}",
                reason=FailureReason.TOKEN_OUTSIDE_VOCABULARY,
            )
