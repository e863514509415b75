"""One request on its way through the engine, and the text its stop strings are looked for in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from penstock.ports import Completion, GenerateRequest, Tokenizer
from penstock.rollout import FinishReason, IntArray, unpack_ids

Answer = asyncio.Future[Completion]
Pieces = asyncio.Queue[Completion | None]
_LONGEST_CHARACTER = 8
"""Tokens after which a text that is still no character is taken as it is."""


class Row:
    """A request and what is known of it before its first token."""

    def __init__(
        self, request: GenerateRequest, tokenizer: Tokenizer, answer: Answer, pieces: Pieces | None = None
    ) -> None:
        self.request = request
        self.on_pause = request.on_pause
        self.pieces = pieces
        """Where a stream gets its tokens; None for a request that waits for the whole answer."""
        self.sent = 0
        """Tokens that went there."""
        self.answer = answer
        """Belongs to an event loop: only touched there."""
        given = unpack_ids(request.response_ids)
        self.context: IntArray = np.concatenate([unpack_ids(request.prompt_ids), given])
        self.given = len(given)
        self.budget = request.params.max_tokens - self.given
        self.prefix_key = self.context[:-1].tobytes()
        self.prefix_step = -1
        """The model step that computed the prefix: another answer may copy it under the same weights only."""
        self.stop_ids = tokenizer.stop_ids | frozenset(request.params.stop_token_ids)
        self.stop_text = StopText(request.params.stop, tokenizer, given.tolist()) if request.params.stop else None
        self._runs: list[tuple[int, int]] = []
        self._counted = 0

    def close_run(self, model_step: int, made: int) -> None:
        """The tokens since the last call, up to the `made`-th, were made by these weights."""
        if made > self._counted:
            before = self._runs.pop()[1] if self._runs and self._runs[-1][0] == model_step else 0
            self._runs.append((model_step, before + made - self._counted))
            self._counted = made

    def completion(self, ids: bytes, logprobs: bytes, reason: FinishReason) -> Completion:
        return Completion(ids=ids, logprobs=logprobs, finish_reason=reason, steps=tuple(self._runs))


class StopText:
    """Finds stop strings in an answer as it grows, decoding a few tokens at a time.

    A token alone may be half a character and may look different without its left neighbour, so the text of a new token
    is what it adds to the tokens decoded just before it.
    """

    def __init__(self, stops: Sequence[str], tokenizer: Tokenizer, given: list[int]) -> None:
        self._stops = stops
        self._reach = max(len(stop) for stop in stops) - 1
        self._tokenizer = tokenizer
        self._left: list[int] = []
        """Tokens whose text is known, as the left neighbours of the next."""
        self._new: list[int] = []
        self._tail = ""
        for token in given:
            self.ends_with(token)

    def ends_with(self, token: int) -> bool:
        """Whether this token completes a stop string."""
        self._new.append(token)
        known = self._tokenizer.decode(self._left)
        added = self._tokenizer.decode(self._left + self._new)[len(known) :]
        if (not added or added.endswith("\ufffd")) and len(self._new) < _LONGEST_CHARACTER:
            return False
        self._left, self._new = self._new, []
        seen = self._tail + added
        self._tail = seen[-self._reach :] if self._reach else ""
        return any(stop in seen for stop in self._stops)
