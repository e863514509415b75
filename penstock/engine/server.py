"""The program of an engine's process: load the model, then answer calls until the socket closes.

    python -m penstock.engine.server <descriptor of the socket> <process id of the parent>

Every call is a task of its own, so a control call never waits for an answer that is being generated. The process ends
with its parent: the kernel sees to it on Linux, the closed socket elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from penstock.engine.config import EmbeddedEngineConfig, VllmEngineConfig
from penstock.engine.frames import (
    METHODS,
    START,
    Call,
    Cancel,
    Failed,
    Piece,
    Reply,
    Setup,
    error_to_wire,
    frame,
    read_frame,
)
from penstock.errors import InfrastructureFailure, ModelError
from penstock.models import load_tokenizer
from penstock.ports import Completion, Engine, LoadedWeights, Tokenizer
from penstock.rollout import FailureReason
from penstock.weights.stored import StoredWeights


@runtime_checkable
class ReadsStoredWeights(Protocol):
    """An engine with processes of its own, which read the weights where they are."""

    async def load_stored(self, stored: StoredWeights, model_step: int) -> LoadedWeights: ...


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, engine: Engine) -> None:
    """Answer calls until the stream ends; then close the engine."""
    open_calls: dict[int, asyncio.Task[None]] = {}
    writer.write(frame(Reply(START, msgspec.Raw(msgspec.msgpack.encode(None)))))
    try:
        while (body := await read_frame(reader)) is not None:
            message = msgspec.msgpack.decode(body, type=Call | Cancel)
            if isinstance(message, Cancel):
                if message.number in open_calls:
                    open_calls[message.number].cancel()
                continue
            task = asyncio.create_task(_answer(message, engine, writer), name=f"{message.method} {message.number}")
            open_calls[message.number] = task
            task.add_done_callback(lambda _, number=message.number: open_calls.pop(number))  # type: ignore[misc]
    finally:
        for task in open_calls.values():
            task.cancel()
        await asyncio.gather(*open_calls.values(), return_exceptions=True)
        await engine.close()
        writer.close()


async def _answer(call: Call, engine: Engine, writer: asyncio.StreamWriter) -> None:
    try:
        result = await (_stream(call, engine, writer) if call.method == "stream" else _run(call, engine))
    except Exception as error:  # whatever it is, the caller must hear of it
        writer.write(frame(Failed(call.number, error_to_wire(error))))
    else:
        writer.write(frame(Reply(call.number, msgspec.Raw(msgspec.msgpack.encode(result)))))


async def _stream(call: Call, engine: Engine, writer: asyncio.StreamWriter) -> Completion:
    """Send every piece but the last, which is the answer of the call."""
    (request,) = msgspec.msgpack.decode(call.arguments, type=METHODS["stream"][0])
    async with contextlib.aclosing(engine.stream(request)) as pieces:
        async for piece in pieces:
            if piece.finish_reason is not None:
                return piece
            writer.write(frame(Piece(call.number, msgspec.Raw(msgspec.msgpack.encode(piece)))))
            await writer.drain()
    raise InfrastructureFailure(
        f"the stream of {request.request_id} ended without a finish reason", reason=FailureReason.ENGINE_NONSENSE
    )


async def _run(call: Call, engine: Engine) -> Any:
    if call.method not in METHODS:
        raise ValueError(f"unknown method {call.method!r}")
    arguments = msgspec.msgpack.decode(call.arguments, type=METHODS[call.method][0])
    if call.method == "load_weights":
        return await _load(engine, *arguments)
    return await getattr(engine, call.method)(*arguments)


async def _load(engine: Engine, stored: StoredWeights, model_step: int) -> LoadedWeights:
    if isinstance(engine, ReadsStoredWeights):
        return await engine.load_stored(stored, model_step)
    receiving = stored.receive()
    # Reading and checking takes a while; other calls are answered meanwhile.
    received = await asyncio.to_thread(receiving.__enter__)
    try:
        await engine.load_weights(received, model_step)
    finally:
        receiving.__exit__(None, None, None)
    return LoadedWeights(model_step=model_step, checksum=received.checksum)


class _ModelTokenizer:
    """The tokenizer of the model's directory, with the parent's stop ids."""

    def __init__(self, inner: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._inner = inner
        self.stop_ids = stop_ids

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(ids)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self._inner.render(messages, tools)


def build(setup: Setup) -> Engine:
    """Raises ModelError when the files of the model cannot be used."""
    disable_progress_bar()
    tokenizer = _ModelTokenizer(load_tokenizer(Path(setup.model_dir)), frozenset(setup.stop_ids))
    try:
        if setup.engine == "vllm":
            return _build_vllm(setup, tokenizer)
        config = EmbeddedEngineConfig(**setup.config)
        return config.build(setup.model_dir, tokenizer, deterministic=setup.deterministic, threads=setup.threads)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"the model in {setup.model_dir} cannot be loaded: {error}") from error


def _build_vllm(setup: Setup, tokenizer: Tokenizer) -> Engine:
    from penstock.engine.vllm_environment import prepare_environment

    config = VllmEngineConfig(**setup.config, python=None)
    prepare_environment(dtype=config.dtype, threads=setup.threads)
    from penstock.engine.vllm import build_engine

    return build_engine(config, setup.model_dir, tokenizer)


def main(descriptor: int, parent: int) -> None:
    _die_with(parent)
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    channel = socket.socket(fileno=descriptor)
    setup = msgspec.msgpack.decode(_read_blocking(channel), type=Setup)
    try:
        engine = build(setup)
    except Exception as error:
        channel.sendall(frame(Failed(START, error_to_wire(error))))
        return
    asyncio.run(_serve_socket(channel, engine))
    sys.stderr.flush()
    # Nothing is left to save, and the interpreter's own way out takes a while with torch in it.
    os._exit(0)


async def _serve_socket(channel: socket.socket, engine: Engine) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    await serve(reader, writer, engine)


def _read_blocking(channel: socket.socket) -> bytes:
    def exactly(size: int) -> bytes:
        body = b""
        while len(body) < size:
            chunk = channel.recv(size - len(body))
            if not chunk:
                os._exit(0)  # the parent is gone
            body += chunk
        return body

    (size,) = struct.unpack(">I", exactly(4))
    return exactly(size)


def _die_with(parent: int) -> None:
    """An engine busy in a step does not see that the socket closed, so the kernel tells it."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
