"""The program of an engine's process: load the model, then answer calls until the socket closes.

    python -m penstock.engine.server <descriptor of the socket> <process id of the parent>

Every call is a task of its own, so a control call never waits for an answer that is being generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from typing import Any

import msgspec

from penstock.child import socket_to_parent
from penstock.engine.frames import MAX_FRAME, METHODS, START, Piece, Setup
from penstock.engine.hosted import HostedEngine, build_hosted
from penstock.errors import InfrastructureFailure
from penstock.garbage import keep_what_is_loaded
from penstock.ports import Completion
from penstock.rollout import FailureReason
from penstock.wire import Call, Cancel, Failed, Reply, error_to_wire, frame, read_blocking, read_frame


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, engine: HostedEngine) -> None:
    """Answer calls until the stream ends; then close the engine."""
    open_calls: dict[int, asyncio.Task[None]] = {}
    writer.write(frame(Reply(START, msgspec.Raw(msgspec.msgpack.encode(None)))))
    try:
        while (body := await read_frame(reader, MAX_FRAME)) is not None:
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


async def _answer(call: Call, engine: HostedEngine, writer: asyncio.StreamWriter) -> None:
    try:
        result = await (_stream(call, engine, writer) if call.method == "stream" else _run(call, engine))
    except Exception as error:  # whatever it is, the caller must hear of it
        writer.write(frame(Failed(call.number, error_to_wire(error))))
    else:
        writer.write(frame(Reply(call.number, msgspec.Raw(msgspec.msgpack.encode(result)))))


async def _stream(call: Call, engine: HostedEngine, writer: asyncio.StreamWriter) -> Completion:
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


async def _run(call: Call, engine: HostedEngine) -> Any:
    if call.method not in METHODS:
        raise ValueError(f"unknown method {call.method!r}")
    arguments = msgspec.msgpack.decode(call.arguments, type=METHODS[call.method][0])
    return await getattr(engine, call.method)(*arguments)


def main(descriptor: int, parent: int) -> None:
    channel = socket_to_parent(descriptor, parent)
    body = read_blocking(channel)
    if body is None:  # the parent is gone
        return
    setup = msgspec.msgpack.decode(body, type=Setup)
    try:
        engine = build_hosted(setup)
    except Exception as error:
        channel.sendall(frame(Failed(START, error_to_wire(error))))
        return
    keep_what_is_loaded()
    asyncio.run(_serve_socket(channel, engine))
    sys.stderr.flush()
    # Nothing is left to save, and the interpreter's own way out takes a while with torch in it.
    os._exit(0)


async def _serve_socket(channel: socket.socket, engine: HostedEngine) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    await serve(reader, writer, engine)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
