"""What goes over the socket between this process and a child of it: frames of a 4-byte length and msgpack.

A call has a number, so many are open at a time and answers come in any order. An error of Penstock arrives as itself,
any other as its words. Nothing is pickled.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from penstock import errors
from penstock.errors import InfrastructureFailure, PenstockError, RefusedError, RolloutFailure
from penstock.rollout import FailureReason

_SIZE = struct.Struct(">I")
_ERRORS: dict[str, type[PenstockError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PenstockError)
}


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


class WireError(msgspec.Struct, frozen=True):
    kind: str
    message: str
    reason: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    number: int
    error: WireError


def frame(message: msgspec.Struct, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    body = msgspec.msgpack.encode(message, enc_hook=enc_hook)
    return _SIZE.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes | None:
    """The next frame's body; None at the end of the stream, also in the middle of a frame."""
    try:
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        if size > max_bytes:
            raise InfrastructureFailure(
                f"a frame of {size} bytes; at most {max_bytes} are read", reason=FailureReason.BAD_FRAME
            )
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def read_blocking(channel: socket.socket) -> bytes | None:
    """As `read_frame`, of a parent, in a thread that has nothing else to do."""
    header = _exactly(channel, _SIZE.size)
    return None if header is None else _exactly(channel, _SIZE.unpack(header)[0])


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    body = bytearray(size)
    view, received = memoryview(body), 0
    while received < size:
        try:
            count = channel.recv_into(view[received:])
        except ConnectionError:
            return None
        if not count:
            return None
        received += count
    return bytes(body)


def error_to_wire(error: BaseException) -> WireError:
    """An error of Penstock keeps its type and reason; any other is the child's own failure."""
    if type(error).__name__ in _ERRORS and isinstance(error, PenstockError):
        reason = error.reason if isinstance(error, RolloutFailure) else ""
        return WireError(type(error).__name__, str(error), reason)
    return WireError(InfrastructureFailure.__name__, f"{type(error).__name__}: {error}", FailureReason.ENGINE_ERROR)


def error_from_wire(error: WireError) -> PenstockError:
    kind = _ERRORS.get(error.kind, InfrastructureFailure)
    if issubclass(kind, RolloutFailure):
        return kind(error.message, reason=FailureReason(error.reason or FailureReason.ENGINE_ERROR))
    return kind(error.message.split("\n")) if issubclass(kind, RefusedError) else kind(error.message)
