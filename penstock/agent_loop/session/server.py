"""SessionServer: the door to the sessions of an agent loop, on a socket of this process.

It listens on loopback unless told otherwise. Each session has a path and a key of its own, drawn at random; both are
gone when the session ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import secrets
import socket
from collections.abc import Iterator

import msgspec
import uvicorn

from penstock.agent_loop.session.app import SESSION, make_app
from penstock.agent_loop.session.exchange import MAX_BODY, Answers
from penstock.agent_loop.session.requests import Refused
from penstock.errors import ConfigError

logger = logging.getLogger(__name__)

ASK_FOR_KEY = {"www-authenticate": "Bearer"}
KEEP_ALIVE_S = 75.0
CLOSE_S = 1.0
START_S = 20.0


class Access(msgspec.Struct, frozen=True):
    """How a client reaches a session."""

    base_url: str
    """For clients of OpenAI, and of Anthropic."""
    key: str


class SessionServer:
    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str = "",
        models: tuple[str, ...] = ("penstock",),
        max_body: int = MAX_BODY,
    ) -> None:
        """`public_url` is how clients elsewhere reach it, where that is not host and port."""
        self.models = models
        self._sessions: dict[str, tuple[bytes, Answers]] = {}
        """By name: the digest of its key, and who answers."""
        self._names: dict[bytes, str] = {}
        """By the digest of a key: of which session it is."""
        self._public_url = public_url.rstrip("/")
        self._listener = Listener(make_app(self, prefix=SESSION, max_body=max_body), host=host, port=port)

    def __len__(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    def open(self, answers: Answers) -> tuple[str, Access]:
        """A name and a key for a session; until `shut`."""
        name, key = secrets.token_hex(8), "sk-" + secrets.token_urlsafe(24)
        self._sessions[name] = (_digest(key), answers)
        self._names[_digest(key)] = name
        return name, Access(f"{self._public_url or self._listener.url}{SESSION.format(session=name)}/v1", key)

    def shut(self, name: str) -> None:
        digest, _ = self._sessions.pop(name)
        del self._names[digest]

    def admit(self, session: str, key: str) -> Answers:
        owner = self._names.get(_digest(key))
        if owner is None:
            raise Refused(401, "the key is missing, or no session has it", code="invalid_api_key", headers=ASK_FOR_KEY)
        if owner != session:
            raise Refused(403, "the key is that of another session", code="wrong_session")
        return self._sessions[owner][1]

    async def start(self) -> None:
        await self._listener.start()

    async def close(self) -> None:
        await self._listener.close()


class Listener:
    """A socket and the server on it, in the event loop that started it."""

    def __init__(self, app: object, *, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.url = ""

    async def start(self) -> None:
        """Once; returns when it listens. Raises ConfigError when the address cannot be had."""
        async with self._starting:
            if self._server is not None:
                return
            listening = self._bind()
            config = uvicorn.Config(
                self._app,  # type: ignore[arg-type]
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=int(KEEP_ALIVE_S),
                timeout_graceful_shutdown=int(CLOSE_S),
            )
            self._server = _Server(config)
            self._serving = asyncio.create_task(self._server.serve(sockets=[listening]), name="session endpoint")
            async with asyncio.timeout(START_S):
                await self._server.ready.wait()

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])

    async def wait(self) -> None:
        """Until it is closed."""
        assert self._serving is not None, "it was not started"
        await asyncio.wait([self._serving])

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # The protocol named, or asyncio does not turn off Nagle's algorithm, and every answer takes 40 ms longer.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self._port))
            listening.listen(2048)
            listening.setblocking(False)
        except OSError as error:
            listening.close()
            raise ConfigError(f"cannot listen on {self._host} port {self._port}: {error}") from error
        shown = f"[{self._host}]" if family == socket.AF_INET6 else self._host
        self.url = f"http://{shown}:{listening.getsockname()[1]}"
        return listening


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals to the run."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    """Looked up in place of the key: how long that takes says nothing about the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
