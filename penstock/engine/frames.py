"""What goes over the socket between an engine's process and its user: frames of a 4-byte length and msgpack.

    user -> engine    Setup once, then Call and Cancel
    engine -> user    Reply or Failed for call 0 once the model is loaded or refused, then one for each call; a stream
                      sends Pieces before its Reply

Calls carry a number, so many are open at a time and answers come in any order.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Literal

import msgspec

from penstock.errors import (
    ConfigError,
    DataFailure,
    EngineUnavailable,
    InfrastructureFailure,
    ModelError,
    PenstockError,
    RefusedError,
    RolloutFailure,
    RunError,
    WeightSyncError,
)
from penstock.ports import Completion, EngineStats, GenerateRequest, LoadedWeights
from penstock.rollout import FailureReason
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


class Call(msgspec.Struct, frozen=True, tag="call"):
    number: int
    method: str
    arguments: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for this call any more; it gets no answer."""

    number: int


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    number: int
    result: msgspec.Raw


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """Of a stream that goes on."""

    number: int
    result: msgspec.Raw


class WireError(msgspec.Struct, frozen=True):
    kind: str
    message: str
    reason: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    number: int
    error: WireError


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

_ERRORS: dict[str, type[PenstockError]] = {
    kind.__name__: kind
    for kind in (
        InfrastructureFailure,
        DataFailure,
        ConfigError,
        ModelError,
        RunError,
        EngineUnavailable,
        WeightSyncError,
    )
}


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's body; None at the end of the stream, also in the middle of a frame."""
    try:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        if size > MAX_FRAME:
            raise InfrastructureFailure(
                f"a frame of {size} bytes; at most {MAX_FRAME} are read", reason=FailureReason.BAD_FRAME
            )
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def error_to_wire(error: Exception) -> WireError:
    """An error of Penstock keeps its type and reason; any other is the engine's own failure."""
    if type(error).__name__ in _ERRORS and isinstance(error, PenstockError):
        reason = error.reason if isinstance(error, RolloutFailure) else ""
        return WireError(type(error).__name__, str(error), reason)
    return WireError(InfrastructureFailure.__name__, f"{type(error).__name__}: {error}", "engine_error")


def error_from_wire(error: WireError) -> PenstockError:
    kind = _ERRORS.get(error.kind, InfrastructureFailure)
    if issubclass(kind, RolloutFailure):
        return kind(error.message, reason=FailureReason(error.reason or "engine_error"))
    return kind(error.message.split("\n")) if issubclass(kind, RefusedError) else kind(error.message)
