"""The routes of the endpoint, as a Starlette application. Every one of them asks for a key first."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from penstock.agent_loop.session import wire_anthropic, wire_openai
from penstock.agent_loop.session.exchange import MAX_BODY, Answers, Exchange, Gone, Receive, Scope, Send, Wire
from penstock.agent_loop.session.requests import Refused

logger = logging.getLogger(__name__)

SESSION = "/s/{session}"
"""Before the routes of an endpoint with several sessions."""


class Door(Protocol):
    """Lets clients in."""

    @property
    def models(self) -> tuple[str, ...]: ...

    def admit(self, session: str, key: str) -> Answers:
        """Raises Refused: 401 for a key that is nobody's, 403 for that of another session."""
        ...


def make_app(door: Door, *, prefix: str = "", max_body: int = MAX_BODY) -> Starlette:
    """One base URL serves the clients of both APIs: OpenAI's leaves `/v1` to it, Anthropic's adds that itself."""
    openai = _Family(door, wire_openai.openai_error, max_body)
    anthropic = _Family(door, wire_anthropic.anthropic_error, max_body)
    messages = wire_anthropic.MessagesWire()
    routes: list[BaseRoute] = []
    for path, methods, handler in (
        ("/chat/completions", ["POST"], openai.answering(wire_openai.ChatWire())),
        ("/completions", ["POST"], openai.answering(wire_openai.CompletionWire())),
        ("/models", ["GET"], openai.handling(_models)),
        ("/messages", ["POST"], anthropic.answering(messages)),
        ("/messages/count_tokens", ["POST"], anthropic.handling(_counting(messages))),
    ):
        versions = ("/v1", "/v1/v1") if path.startswith("/messages") else ("/v1", "")
        routes += [Route(version + path, handler, methods=methods) for version in versions]
    app = Starlette(routes=[Mount(prefix, routes=routes)] if prefix else routes)
    app.add_exception_handler(HTTPException, _not_served)
    return app


Handler = Callable[[Exchange, Answers, Door, int], Awaitable[None]]


class _Family:
    """What the routes of one API have in common: the key first, then the request, and errors in its own shape."""

    def __init__(self, door: Door, error: Callable[[Refused], bytes], max_body: int) -> None:
        self._door = door
        self._error = error
        self._max_body = max_body

    def answering(self, wire: Wire) -> _App:
        async def answer(exchange: Exchange, answers: Answers, door: Door, max_body: int) -> None:
            body = await exchange.read(max_body)
            reply = answers.ask(wire.read(body), request=exchange.digest(body), retried=exchange.retried)
            delivered = False
            try:
                await exchange.deliver(wire, reply)
                delivered = True
            finally:
                answers.ended(reply, delivered=delivered)

        return self.handling(answer)

    def handling(self, handler: Handler) -> _App:
        return _App(self._door, self._error, self._max_body, handler)


class _App:
    """An ASGI application: Starlette calls one as it is, without a `Request` and a `Response` around it."""

    def __init__(self, door: Door, error: Callable[[Refused], bytes], max_body: int, handler: Handler) -> None:
        self._door = door
        self._error = error
        self._max_body = max_body
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            answers = self._door.admit(scope["path_params"].get("session", ""), exchange.key)
            await self._handler(exchange, answers, self._door, self._max_body)
        except Gone:
            pass
        except Refused as refused:
            with contextlib.suppress(Gone):
                await exchange.respond(refused.status, self._error(refused), refused.headers)
        except Exception as error:
            logger.exception("a request could not be served")
            if exchange.started:
                raise
            fault = Refused(500, f"{type(error).__name__}: {error}", code="server_error")
            with contextlib.suppress(Gone):
                await exchange.respond(500, self._error(fault))


async def _models(exchange: Exchange, answers: Answers, door: Door, max_body: int) -> None:
    await exchange.respond(200, wire_openai.models(door.models))


def _counting(wire: wire_anthropic.MessagesWire) -> Handler:
    async def count(exchange: Exchange, answers: Answers, door: Door, max_body: int) -> None:
        asking = wire.read_count(await exchange.read(max_body))
        await exchange.respond(200, wire_anthropic.token_count(answers.count(asking)))

    return count


async def _not_served(request: Request, error: Exception) -> Response:
    """An unknown path or method, in the shape of the API whose it would be."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    what = f"{request.method} {request.url.path} is not served"
    shape: Any = wire_anthropic.anthropic_error if "/messages" in request.url.path else wire_openai.openai_error
    refused = Refused(status, what, code="not_found")
    return Response(shape(refused), status_code=status, media_type="application/json")
