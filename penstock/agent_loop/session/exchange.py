"""One HTTP request and its response: who asks, what is asked, and whether the answer arrived."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Protocol

from penstock.agent_loop.session.reply import Reply
from penstock.agent_loop.session.requests import Asking, Finished, Refused

logger = logging.getLogger(__name__)

MAX_BODY = 32 << 20
"""Bytes; a conversation of a million tokens has a fifth of that."""
BODY_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 60.0
"""For a client to take what it is sent; one that does not read is as good as gone."""
ANSWER_TIMEOUT_S = 540.0
"""Below what the clients of OpenAI and Anthropic wait, 600 s: it is the server that ends a wait, and a client that asks
again joins the answer that is still being made."""

RETRY_COUNT = b"x-stainless-retry-count"
CLOSE = {"connection": "close"}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Wire(Protocol):
    """One API's way to write what is asked and answered."""

    def read(self, body: bytes) -> Asking:
        """Raises Refused."""
        ...

    def whole(self, asking: Asking, answer: Finished) -> bytes: ...

    def opening(self, asking: Asking, answer_id: str, prompt_tokens: int) -> Iterator[bytes]: ...

    def piece(self, asking: Asking, answer_id: str, text: str) -> bytes: ...

    def closing(self, asking: Asking, answer: Finished) -> Iterator[bytes]:
        """After all pieces: calls, why it ended, what it cost."""
        ...

    def error(self, refused: Refused) -> bytes: ...

    def broken(self, refused: Refused) -> bytes:
        """An error in the middle of a stream."""
        ...


class Answers(Protocol):
    """Who answers a client that was let in."""

    def ask(self, asking: Asking, *, request: bytes = b"", retried: bool = False) -> Reply: ...

    def count(self, asking: Asking) -> int: ...

    def ended(self, reply: Reply, *, delivered: bool) -> None:
        """The client has all of it, or is gone, or was told why not."""
        ...


class Gone(Exception):
    """The client closed the connection."""


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._path = str(scope["path"])
        self._gone = False
        self._late = False
        self.started = False
        """The response has begun."""

    @property
    def key(self) -> str:
        """As either API sends it; empty when there is none."""
        scheme, _, token = self._headers.get(b"authorization", b"").partition(b" ")
        given = token if scheme.lower() == b"bearer" and token else self._headers.get(b"x-api-key", b"")
        return given.decode("latin-1").strip()

    @property
    def retried(self) -> bool:
        """The client marked it as asked before."""
        count = self._headers.get(RETRY_COUNT, b"0")
        return count.isdigit() and bool(count.strip(b"0"))

    async def read(self, max_body: int) -> bytes:
        """The body, whole. Raises Refused when it is longer or slower than allowed, Gone when the client is gone."""
        too_long = Refused(413, f"the request body is longer than {max_body} bytes", code="too_large", headers=CLOSE)
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > max_body:
            raise too_long
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await self._receive()
                    if message["type"] != "http.request":
                        raise Gone
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > max_body:
                        raise too_long
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise Refused(408, "the request body did not arrive", code="timeout", headers=CLOSE) from None

    def digest(self, body: bytes) -> bytes:
        """Equal for requests that are equal byte for byte."""
        # The fastest there is: who finds two requests with one digest gets an answer of their own twice.
        digest = hashlib.sha1(self._path.encode() + b"\n", usedforsecurity=False)
        digest.update(body)
        return digest.digest()

    async def respond(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        await self._begin(status, "application/json", {"content-length": str(len(body)), **(headers or {})})
        await self._end(body)

    async def deliver(self, wire: Wire, reply: Reply, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """The answer, whole or as it is made. Raises Refused before it began; Gone when the client left."""
        watch = asyncio.create_task(self._watch(reply), name="client")
        timer = asyncio.get_running_loop().call_later(timeout_s, self._be_late, reply)
        try:
            if reply.asking.stream:
                await self._stream(wire, reply)
            else:
                await self._until(reply, lambda: reply.is_over)
                body = wire.whole(reply.asking, reply.result())
                await self._begin(200, "application/json", self._answer_headers(reply, len(body)))
                await self._still_there()
                await self._end(body)
            reply.delivered()
        finally:
            timer.cancel()
            watch.cancel()

    # Inside.

    async def _stream(self, wire: Wire, reply: Reply) -> None:
        asking, told = reply.asking, 0
        try:
            while True:
                await self._until(reply, lambda told=told: reply.is_over or told < len(reply.pieces))  # type: ignore[misc]
                new, told = "".join(reply.pieces[told:]), len(reply.pieces)
                answer = reply.result() if reply.is_over else None
                if not self.started:
                    await self._begin(200, "text/event-stream", self._answer_headers(reply))
                    await self._more(b"".join(wire.opening(asking, reply.answer_id, reply.prompt_tokens)))
                if new:
                    await self._more(wire.piece(asking, reply.answer_id, new))
                if answer is not None:
                    await self._still_there()
                    await self._end(b"".join(wire.closing(asking, answer)))
                    return
        except Refused as refused:
            if not self.started:
                raise
            await self._end(wire.broken(refused))
            raise Gone from None

    async def _until(self, reply: Reply, holds: Callable[[], bool]) -> None:
        await reply.changed.wait_until(lambda: holds() or self._gone or self._late)
        if self._gone:
            raise Gone
        if self._late and not holds():
            raise Refused(
                503, "the answer is still being made; ask again", code="timeout", headers={"x-should-retry": "true"}
            )

    async def _watch(self, reply: Reply) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        reply.changed.notify()

    def _be_late(self, reply: Reply) -> None:
        self._late = True
        reply.changed.notify()

    async def _still_there(self) -> None:
        """A connection that was lost is noticed in the next round of the loop. Raises Gone."""
        await asyncio.sleep(0)
        if self._gone:
            raise Gone

    def _answer_headers(self, reply: Reply, length: int | None = None) -> dict[str, str]:
        headers = {"x-request-id": reply.answer_id}
        return headers | ({"cache-control": "no-cache"} if length is None else {"content-length": str(length)})

    async def _begin(self, status: int, content_type: str, headers: dict[str, str]) -> None:
        self.started = True
        encoded = [(name.encode(), value.encode()) for name, value in {"content-type": content_type, **headers}.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": encoded})

    async def _more(self, body: bytes) -> None:
        if body:
            await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self, body: bytes) -> None:
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    async def _put(self, message: MutableMapping[str, Any]) -> None:
        """Raises Gone."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send(message)
        except TimeoutError:
            raise Gone from None
