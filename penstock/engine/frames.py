"""What an engine's process and its user say to each other, in the frames of `penstock.wire`.

user -> engine    Setup once, then Call and Cancel
engine -> user    Reply or Failed for call 0 once the model is loaded or refused, then one for each call; a stream
                  sends Pieces before its Reply
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.ports import Completion, EngineStats, GenerateRequest, LoadedWeights
from penstock.weights.stored import StoredWeights

MAX_FRAME = 64 << 20
"""The longest request is a context of token ids; more than this is no frame."""
START = 0
"""The number of the call that stands for loading the model."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's process builds."""

    engine: Literal["embedded", "vllm"] = "embedded"
    config: dict[str, Any]
    """The fields of its configuration."""
    model_dir: str
    stop_ids: tuple[int, ...]
    deterministic: bool = False
    threads: int | None = None
    most_threads: int | None = None


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """Of a stream that goes on."""

    number: int
    result: msgspec.Raw


METHODS: dict[str, tuple[Any, Any]] = {
    "generate": (tuple[GenerateRequest], Completion),
    "stream": (tuple[GenerateRequest], Completion),
    "score": (tuple[bytes], bytes),
    "pause_generation": (tuple[()], None),
    "continue_generation": (tuple[()], None),
    "abort": (tuple[list[str]], None),
    "sleep": (tuple[()], None),
    "wake": (tuple[()], None),
    "load_weights": (tuple[StoredWeights, int], LoadedWeights),
    "model_step": (tuple[()], int),
    "check_health": (tuple[()], None),
    "stats": (tuple[()], EngineStats),
}
"""The arguments and the result of everything that may be called; nothing else can be."""
