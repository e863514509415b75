"""The wire between an engine's process and its user: the same frames, server and client, without a process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from engine_contract import (
    CONTRACT,
    Subject,
    ask,
)
from engine_processes import run

from penstock.engine.frames import MAX_FRAME
from penstock.engine.hosted import HostedEngine
from penstock.engine.remote import RemoteEngine
from penstock.engine.server import serve
from penstock.errors import (
    ConfigError,
    DataFailure,
    InfrastructureFailure,
    ModelError,
    RunError,
    WeightSyncError,
)
from penstock.rollout import FailureReason
from penstock.wire import Call, Failed, Reply, error_from_wire, error_to_wire, frame


class Wired:
    """A `RemoteEngine` whose server runs in this event loop. It connects with the first call."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._connecting: asyncio.Task[RemoteEngine] | None = None
        self._serving: asyncio.Task[None] | None = None

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        self._connecting = self._connecting or asyncio.create_task(self._connect())
        async with contextlib.aclosing((await self._connecting).stream(request)) as pieces:
            async for piece in pieces:
                yield piece

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any) -> Any:
            self._connecting = self._connecting or asyncio.create_task(self._connect())
            return await getattr(await self._connecting, method)(*arguments)

        return call

    async def _connect(self) -> RemoteEngine:
        ours, theirs = socket.socketpair()
        self._serving = asyncio.create_task(
            serve(*await asyncio.open_connection(sock=theirs), HostedEngine(self._make()))
        )

        async def why_ended() -> InfrastructureFailure:
            return InfrastructureFailure("the server ended", reason=FailureReason.ENGINE_DIED)

        return RemoteEngine(*await asyncio.open_connection(sock=ours), why_ended)

    async def close(self) -> None:
        if self._connecting is not None:
            await (await self._connecting).close()
        if self._serving is not None:
            await self._serving


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_contract_holds_over_the_wire(
    check: Callable[[Subject], Awaitable[None]], subjects: dict[str, Subject]
) -> None:
    inner = subjects["llama"]
    subject = Subject(
        make=lambda: Wired(inner.make),  # type: ignore[arg-type, return-value]
        other_weights=inner.other_weights,
        reference=inner.reference,
    )
    asyncio.run(check(subject))


@pytest.mark.parametrize(
    "error",
    [
        InfrastructureFailure("the thread died", reason=FailureReason.ENGINE_DIED),
        DataFailure("too long", reason=FailureReason.CONTEXT_TOO_LONG),
        WeightSyncError("refused"),
        ModelError(["no config.json", "no weights"]),
        ConfigError("max_running is 0"),
        RunError("cannot sleep"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_as_what_they_were(error: Exception) -> None:
    arrived = error_from_wire(error_to_wire(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert getattr(arrived, "reason", None) == getattr(error, "reason", None)


def test_an_error_that_is_not_ours_is_the_engines_failure() -> None:
    arrived = error_from_wire(error_to_wire(ZeroDivisionError("division by zero")))
    assert isinstance(arrived, InfrastructureFailure)
    assert str(arrived) == "ZeroDivisionError: division by zero"
    assert arrived.reason == "engine_error"


def test_a_method_that_is_not_of_the_port_cannot_be_called(subjects: dict[str, Subject]) -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(
            serve(*await asyncio.open_connection(sock=theirs), HostedEngine(subjects["llama"].make()))
        )
        reader, writer = await asyncio.open_connection(sock=ours)
        for method in ("close", "__class__", "_call"):
            writer.write(frame(Call(1, method, msgspec.Raw(msgspec.msgpack.encode(())))))
        answers = []
        for _ in range(4):
            size = int.from_bytes(await reader.readexactly(4), "big")
            answers.append(msgspec.msgpack.decode(await reader.readexactly(size), type=Reply | Failed))
        assert isinstance(answers[0], Reply)
        for answer in answers[1:]:
            assert isinstance(answer, Failed)
            assert "unknown method" in answer.error.message
        writer.close()
        await serving

    run(test)


def test_a_stream_that_is_no_stream_of_frames_fails_all_that_is_open() -> None:
    async def test() -> None:
        for garbage in (b"\xff" * 64, (4).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1", (MAX_FRAME + 1).to_bytes(4, "big")):
            ours, theirs = socket.socketpair()

            async def why_ended() -> InfrastructureFailure:
                return InfrastructureFailure("the process lives on", reason=FailureReason.ENGINE_DIED)

            engine = RemoteEngine(*await asyncio.open_connection(sock=ours), why_ended)
            asking = asyncio.create_task(engine.generate(ask("a")))
            theirs.sendall(garbage)
            with pytest.raises(InfrastructureFailure, match="cannot be read"):
                await asking
            with pytest.raises(InfrastructureFailure):
                await engine.check_health()
            await engine.close()
            theirs.close()

    run(test)
