"""Configurations of the engines. Nothing here imports torch: the implementation is imported by `build`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pydantic

from penstock.config import Config
from penstock.ports import Engine, Tokenizer


class EmbeddedEngineConfig(Config):
    """The engine in this process, for a machine with nothing but torch."""

    max_running: int = pydantic.Field(default=64, ge=1)
    """Answers made at the same time; more requests wait."""
    max_context: int | None = pydantic.Field(default=None, ge=2)
    """Prompt and answer together, in tokens. None: what the model was made for."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    prefill_chunk_tokens: int = pydantic.Field(default=512, ge=32)
    """Prompt tokens computed between two decode steps: the longest wait a new prompt causes the running answers."""
    device: str = "cpu"
    fused: bool = True
    """Use the fused forward where the architecture has one; False takes the model's own forward."""

    def problems(self) -> Iterator[str]:
        if self.prefill_chunk_tokens % 32:
            yield f"prefill_chunk_tokens is {self.prefill_chunk_tokens}; it must be a multiple of 32"

    def build(
        self, model_dir: str, tokenizer: Tokenizer, *, deterministic: bool = False, threads: int | None = None
    ) -> Engine:
        """Load the model and start the engine's thread. Blocks while loading. Raises ModelError."""
        from penstock.engine.torch_engine.build import build_engine

        self.check()
        return build_engine(self, model_dir, tokenizer, deterministic=deterministic, threads=threads)
