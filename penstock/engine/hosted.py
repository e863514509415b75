"""An engine for callers in other processes: built from a `Setup`, it reads stored weights where they are.

The process around it is `server.py`, or an actor of `cluster/`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError

from penstock.engine.config import EmbeddedEngineConfig, VllmEngineConfig
from penstock.engine.frames import Setup
from penstock.errors import ModelError
from penstock.models import load_tokenizer
from penstock.ports import Completion, Engine, EngineStats, GenerateRequest, LoadedWeights, Tokenizer
from penstock.weights.stored import StoredWeights


@runtime_checkable
class ReadsStoredWeights(Protocol):
    """An engine with processes of its own, which read the weights where they are."""

    async def load_stored(self, stored: StoredWeights, model_step: int) -> LoadedWeights: ...


class HostedEngine:
    """The `Engine` port, but that weights come as a record of where they are."""

    def __init__(self, engine: Engine, tokenizer: HostedTokenizer | None = None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._open: set[asyncio.Task[Any]] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        with self._opened():
            await self._prepare(request)
            return await self._engine.generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        with self._opened():
            await self._prepare(request)
            async with contextlib.aclosing(self._engine.stream(request)) as pieces:
                async for piece in pieces:
                    yield piece

    async def score(self, ids: bytes) -> bytes:
        with self._opened():
            return await self._engine.score(ids)

    async def pause_generation(self) -> None:
        await self._engine.pause_generation()

    async def continue_generation(self) -> None:
        await self._engine.continue_generation()

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._engine.abort(request_ids)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    async def load_weights(self, source: StoredWeights, model_step: int) -> LoadedWeights:
        if isinstance(self._engine, ReadsStoredWeights):
            return await self._engine.load_stored(source, model_step)
        receiving = source.receive()
        # Reading and checking takes a while; other calls are answered meanwhile.
        received = await asyncio.to_thread(receiving.__enter__)
        try:
            await self._engine.load_weights(received, model_step)
        finally:
            receiving.__exit__(None, None, None)
        return LoadedWeights(model_step=model_step, checksum=received.checksum)

    async def model_step(self) -> int:
        return await self._engine.model_step()

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def drop_all(self) -> None:
        """Whoever asked is gone: nobody waits for what is open."""
        dropped = list(self._open)
        for task in dropped:
            task.cancel()
        await asyncio.gather(*dropped, return_exceptions=True)

    async def close(self) -> None:
        await self._engine.close()

    async def _prepare(self, request: GenerateRequest) -> None:
        if request.params.stop and self._tokenizer is not None and not self._tokenizer.is_loaded:
            # That takes seconds; other calls are answered meanwhile.
            await asyncio.to_thread(self._tokenizer.load)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            yield
        finally:
            self._open.discard(task)


class HostedTokenizer:
    """The tokenizer of the model's directory, with the parent's stop ids. It is loaded when it is first needed: most
    answers end with an id, and transformers takes as long to import as all else that a small engine does to start."""

    def __init__(self, directory: Path, stop_ids: frozenset[int]) -> None:
        self._directory = directory
        self._inner: Tokenizer | None = None
        self._loading = threading.Lock()
        self.stop_ids = stop_ids

    @property
    def is_loaded(self) -> bool:
        return self._inner is not None

    def load(self) -> Tokenizer:
        """Raises ModelError."""
        with self._loading:
            self._inner = self._inner or load_tokenizer(self._directory)
            return self._inner

    @property
    def vocab_size(self) -> int:
        return self.load().vocab_size

    def encode(self, text: str) -> list[int]:
        return self.load().encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.load().decode(ids)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.load().render(messages, tools)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = True,
    ) -> str:
        return self.load().render_text(messages, tools, generation_prompt=generation_prompt)


def build_hosted(setup: Setup) -> HostedEngine:
    """Loads the model; blocks. Raises ModelError when its files cannot be used."""
    tokenizer = HostedTokenizer(Path(setup.model_dir), frozenset(setup.stop_ids))
    try:
        if setup.engine == "vllm":
            return HostedEngine(_build_vllm(setup, tokenizer), tokenizer)
        config = EmbeddedEngineConfig(**setup.config)
        engine = config.build(
            setup.model_dir,
            tokenizer,
            deterministic=setup.deterministic,
            threads=setup.threads,
            most_threads=setup.most_threads,
        )
        return HostedEngine(engine, tokenizer)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"the model in {setup.model_dir} cannot be loaded: {error}") from error


def _build_vllm(setup: Setup, tokenizer: Tokenizer) -> Engine:
    from penstock.engine.vllm_environment import prepare_environment

    config = VllmEngineConfig(**setup.config, python=None)
    # vLLM makes room for the threads it starts with: the most it may have.
    prepare_environment(dtype=config.dtype, threads=setup.most_threads or setup.threads)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    from penstock.engine.vllm import build_engine

    return build_engine(config, setup.model_dir, tokenizer, threads=setup.threads, most_threads=setup.most_threads)
