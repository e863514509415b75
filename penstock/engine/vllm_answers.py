"""What one request to vLLM becomes: its seed, its answer as it arrives. Nothing here imports vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Any

from penstock.errors import InfrastructureFailure
from penstock.ports import Completion, OnPause, Tokenizer
from penstock.rollout import FailureReason, FinishReason, pack_ids, pack_logprobs

_FINISH = {str(reason): reason for reason in FinishReason}
INITIAL_VERSION = "default"
"""What vLLM calls the weights it started with: model step 0."""


def seed_of(seed: int, first_uniform: int) -> int:
    """vLLM's seeds begin at the first token of a request: a continued answer must not replay the numbers it used."""
    digest = hashlib.blake2b(f"{seed}:{first_uniform}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def step_of(version: str) -> int:
    return 0 if version == INITIAL_VERSION else int(version)


class Answer:
    """What vLLM sent of one answer so far."""

    def __init__(self, request_id: str, on_pause: OnPause) -> None:
        self.request_id = request_id
        self.on_pause = on_pause
        self.ended = asyncio.Event()
        self.ids: list[int] = []
        self.cut: int | None = None
        """So many tokens are the answer: it was found to have ended before vLLM stopped."""
        self._finish_reason: str | None = None
        self._logprobs: list[float] = []
        self._steps: tuple[tuple[int, int], ...] = ()
        self._arrived_under = 0

    def take(self, output: Any, model_step: int) -> None:
        """A piece of the answer: a `CompletionOutput` of kind DELTA, and what was loaded when it arrived."""
        self.ids += output.token_ids
        self._arrived_under = model_step
        for token, likeliest in zip(output.token_ids, output.logprobs or (), strict=True):
            self._logprobs.append(likeliest[token].logprob)
        self._finish_reason = output.finish_reason
        if output.weight_versions:
            self._steps = tuple((step_of(run.version), run.end - run.start) for run in output.weight_versions)

    def abort(self) -> None:
        """It ends before vLLM was asked."""
        self._finish_reason = str(FinishReason.ABORT)

    def piece(self, sent: int) -> Completion:
        """What came after the first `sent` tokens, which came in whole pieces.

        vLLM names the weights of all tokens with the last of them; until then it is what was loaded.
        """
        ids = self.ids[sent : self.cut]
        return Completion(
            ids=pack_ids(ids),
            logprobs=pack_logprobs(self._logprobs[sent : self.cut]),
            finish_reason=None,
            steps=((self._arrived_under, len(ids)),) if ids else (),
        )

    def completion(self) -> Completion:
        finish_reason = _FINISH.get(self._finish_reason or "") if self.cut is None else FinishReason.STOP
        if finish_reason is None:
            raise InfrastructureFailure(
                f"request {self.request_id}: vLLM ended it with {self._finish_reason!r}",
                reason=FailureReason.ENGINE_ERROR,
            )
        return Completion(
            ids=pack_ids(self.ids[: self.cut]),
            logprobs=pack_logprobs(self._logprobs[: self.cut]),
            finish_reason=finish_reason,
            steps=_first(self.cut, self._steps),
        )


def _first(n: int | None, runs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """The runs of the first n tokens."""
    if n is None:
        return runs
    kept = []
    for step, length in runs:
        kept.append((step, min(length, n)))
        n -= min(length, n)
    return tuple(run for run in kept if run[1])


class StraddlingStop:
    """A stop string that begins in what a continued answer already has. vLLM looks at the new text alone."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], given: list[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops if given else ()
        self._reach = max((len(stop) for stop in stops), default=0)
        self._before = given[-self._reach :] if self._reach else []
        self._seen = 0

    def find(self, ids: list[int]) -> int | None:
        """How many tokens of `ids` the answer has with the one that completes a stop string."""
        if not self._stops:
            return None
        # Beyond the longest stop string nothing reaches back to what was given.
        for end in range(self._seen + 1, min(len(ids), self._reach) + 1):
            text = self._tokenizer.decode([*self._before, *ids[:end]])
            if any(stop in text for stop in self._stops):
                return end
        self._seen = len(ids)
        return None


class Stopwatch:
    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    def run(self, running: bool) -> None:
        if running and self._since is None:
            self._since = time.perf_counter()
        elif not running and self._since is not None:
            self._total += time.perf_counter() - self._since
            self._since = None

    def seconds(self) -> float:
        return self._total + (time.perf_counter() - self._since if self._since is not None else 0.0)
