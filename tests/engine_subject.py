"""An engine to check: how it is made, asked and waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from penstock.ports import Completion, Engine, EngineStats, GenerateRequest, OnPause
from penstock.rollout import SampleParams, pack_ids, unpack_ids

DEADLINE = 150.0
"""For one check; a busy machine may leave a process without a core for most of a minute."""


@dataclass(frozen=True)
class Tensors:
    """A `WeightSource` over a state dict."""

    state: Mapping[str, Any]

    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield from self.state.items()


class CharacterTokenizer:
    """Token i is the i-th printable character; no template, and by default no end-of-text."""

    def __init__(self, vocab_size: int = 96, stop_ids: frozenset[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids

    def encode(self, text: str) -> list[int]:
        return [ord(character) - 32 for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(int(token) + 32) for token in ids)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


@dataclass(frozen=True)
class Subject:
    make: Callable[[], Engine]
    """A fresh engine with `CharacterTokenizer`'s 96 tokens, no end-of-text, a context of at least 2048,
    at least 4 and at most 8 requests running at once."""
    other_weights: Tensors
    """Weights under which greedy answers differ."""
    reference: Callable[[Sequence[int], float], np.ndarray]
    """The trainer's view: log_softmax(logits / temperature) after each token, (length x vocabulary)."""
    numbered_randomness: bool = True
    """The i-th token uses the i-th random number of its seed: a continued sample equals the uninterrupted one."""


Check = Callable[[Subject], Awaitable[None]]


class AsNew:
    """A running engine that looks new to each check, where starting one takes seconds."""

    def __init__(self, engine: Engine, weights: Tensors) -> None:
        self._engine = engine
        self._weights = weights
        self._made_before: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def again(self) -> AsNew:
        """What `Subject.make` returns. Closing it brings the engine back to step 0 and leaves it running."""
        self._made_before = None
        return self

    async def generate(self, request: Any) -> Any:
        await self.stats()
        return await self._engine.generate(request)

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        await self.stats()
        async with contextlib.aclosing(self._engine.stream(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def stats(self) -> EngineStats:
        stats = await self._engine.stats()
        if self._made_before is None:
            self._made_before = stats.generated_tokens
        return msgspec.structs.replace(stats, generated_tokens=stats.generated_tokens - self._made_before)

    async def close(self) -> None:
        await self._engine.pause_generation()
        if await self._engine.model_step() != 0:
            await self._engine.load_weights(self._weights, 0)
        await self._engine.continue_generation()


PROMPTS = ([5, 17, 40, 8], [33], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [60] * 37, [7, 8])
LONG = 1500
"""An answer so long that a test always finds it unfinished."""


def ask(
    name: str,
    prompt: Sequence[int] = PROMPTS[0],
    *,
    seed: int = 0,
    given: Sequence[int] = (),
    on_pause: OnPause = "abort",
    **params: Any,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=pack_ids(prompt),
        response_ids=pack_ids(given),
        params=SampleParams(**{"max_tokens": 12, **params}),
        seed=seed,
        first_uniform=len(given),
        on_pause=on_pause,
    )


@contextlib.asynccontextmanager
async def running(subject: Subject) -> AsyncIterator[Engine]:
    async with asyncio.timeout(DEADLINE):
        engine = subject.make()
        try:
            yield engine
        finally:
            await engine.close()


async def has_made(engine: Engine, tokens: int) -> None:
    """Waits until the engine has made so many tokens since it started."""
    while (await engine.stats()).generated_tokens < tokens:  # noqa: ASYNC110 - an engine has no event for this
        await asyncio.sleep(0.001)


async def has_requests(engine: Engine, count: int) -> None:
    """Waits until the engine knows of so many."""
    while (stats := await engine.stats()).running + stats.waiting < count:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def has_none(engine: Engine) -> None:
    """Waits until the engine knows of no request."""
    while (stats := await engine.stats()).running + stats.waiting:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def ids_of(completion: Completion) -> list[int]:
    return unpack_ids(completion.ids).tolist()


def logprobs_of(completion: Completion) -> np.ndarray:
    return np.frombuffer(completion.logprobs, dtype=np.float32)
