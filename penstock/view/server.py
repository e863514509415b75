"""Serves the page on loopback. Whoever has the token in the printed address may look; nobody can change anything.

The token comes once in the address and stays in a cookie, so that it is in no link and in no log of the page itself.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.view.rollouts import refused
from penstock.view.runs import Run, Runs

PAGE = Path(__file__).parent / "page"
COOKIE = "penstock_view"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def make_app(runs: Runs, token: str) -> Starlette:
    def asked(answer: Callable[[Run, Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            def look() -> Response:
                run = runs.get(request.path_params["run"])
                if run is None:
                    return JSONResponse({"error": "there is no such run"}, status_code=404)
                try:
                    with run.lock:
                        found = answer(run, request)
                except (ValueError, KeyError, OverflowError) as error:
                    return JSONResponse({"error": str(error)}, status_code=400)
                except PenstockError as error:
                    return JSONResponse({"error": refused(error)}, status_code=409)
                if found is None:
                    return JSONResponse({"error": "not found"}, status_code=404)
                return JSONResponse(found)

            return await anyio.to_thread.run_sync(look)

        return route

    async def listed(request: Request) -> Response:
        def look() -> list[dict[str, Any]]:
            briefs = []
            for name in runs.names():
                if (run := runs.get(name)) is not None:
                    with run.lock:
                        briefs.append(run.brief())
            return briefs

        return JSONResponse({"runs": await anyio.to_thread.run_sync(look)})

    async def page(request: Request) -> Response:
        name = request.path_params.get("file", "index.html")
        file = PAGE / name
        if file.suffix not in TYPES or file.parent != PAGE or not file.is_file():
            return Response("not found", status_code=404)
        return FileResponse(file, media_type=TYPES[file.suffix])

    return Starlette(
        routes=[
            Route("/", page),
            Route("/page/{file}", page),
            Route("/api/runs", listed),
            Route("/api/{run}/now", asked(lambda run, _: run.now())),
            Route("/api/{run}/curves", asked(lambda run, request: run.curves(request.query_params.getlist("name")))),
            Route("/api/{run}/timeline", asked(lambda run, request: run.timeline(_number(request, "last")))),
            Route("/api/{run}/batch", asked(_batch)),
            Route("/api/{run}/rollouts", asked(_find)),
            Route("/api/{run}/histogram", asked(_histogram)),
            Route("/api/{run}/rollout", asked(_rollout)),
            Route("/api/{run}/untrained", asked(lambda run, _: run.groups.untrained())),
            Route("/api/{run}/groups", asked(_groups)),
            Route("/api/{run}/group", asked(lambda run, request: run.groups.story(request.query_params["id"]))),
        ],
        middleware=[Middleware(_Door, token=token)],
    )


class _Door:
    """Lets in who has the token; everybody else gets 401 and nothing happens."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if (given := request.query_params.get("token")) is not None and self._right(given):
            url = request.url.remove_query_params("token")
            answer = RedirectResponse(f"{url.path}?{url.query}" if url.query else url.path, headers=HEADERS)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            await answer(scope, receive, send)
        elif self._right(request.cookies.get(COOKIE, "")):
            await self._app(scope, receive, _with_headers(send))
        else:
            text = "401: open the address that `penstock view` printed; it has the token\n"
            await Response(text, status_code=401, headers=HEADERS)(scope, receive, send)

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _with_headers(send: Send) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        await send(message)

    return sending


class ViewServer:
    """Bound when it is made: its address is known before it serves."""

    def __init__(self, runs: Runs, *, port: int = 0) -> None:
        """Raises OSError when the port is taken."""
        self._socket = socket.create_server(("127.0.0.1", port))
        token = secrets.token_urlsafe(24)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/?token={token}"
        config = uvicorn.Config(make_app(runs, token), log_level="error", access_log=False, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)

    def serve(self) -> None:
        """Until Ctrl-C, or until `stop` is called in another thread."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True


# What routes read of a request.


def _number(request: Request, name: str) -> int | None:
    value = request.query_params.get(name)
    return None if value in (None, "") else int(value)


def _real(request: Request, name: str) -> float | None:
    value = request.query_params.get(name)
    return None if value in (None, "") else float(value)


def _batch(run: Run, request: Request) -> dict[str, Any]:
    step = _number(request, "step")
    if step is None:
        step = run.history.steps[-1].step if run.history.steps else 0
    return {"step": step, **run.batch(step)}


def _find(run: Run, request: Request) -> dict[str, Any]:
    words = ("kind", "task", "status", "group_id", "rollout_id")
    asked: dict[str, Any] = {name: request.query_params.get(name) or None for name in words}
    asked |= {"text": request.query_params.get("text", ""), "step": _number(request, "step")}
    asked |= {"min_reward": _real(request, "min_reward"), "max_reward": _real(request, "max_reward")}
    return run.rollouts.find(asked, request.query_params.get("after") or None)


def _histogram(run: Run, request: Request) -> dict[str, Any] | None:
    kind, task = request.query_params.get("kind") or "train", request.query_params.get("task") or None
    return run.rollouts.histogram(kind, _number(request, "step"), task)


def _rollout(run: Run, request: Request) -> dict[str, Any] | None:
    step = _number(request, "step")
    if step is None:
        raise ValueError("step is missing")
    return run.rollouts.read(request.query_params["id"], request.query_params.get("kind") or "train", step)


def _groups(run: Run, request: Request) -> dict[str, Any]:
    asked = request.query_params
    after = _number(request, "after")
    rows = run.groups.page(
        asked["state"], asked.get("reason") or None, asked.get("task") or None, -1 if after is None else after
    )
    return {"groups": rows, "next": rows[-1]["sequence"] if rows else None}
