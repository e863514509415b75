"""The program of an actor: it hosts any object that a `Description` describes, with proxies of the ports it takes.

Two groups of calls, each with a loop of its own in Ray:

    default    data calls, thousands at a time, in lists (`peer.py`); the objects live on this loop
    control    pause, abort, stages, health, metrics, close: answered while the other is full

An object is built when it is installed, in a thread: a model may take minutes, and the actor answers meanwhile. A
restarted actor has no object until somebody installs it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray

from penstock.cluster.backcalls import Outbox
from penstock.cluster.line import COLLECT_S, SILENT_S
from penstock.cluster.peer import Answer, Answering, Message, decode_messages, encode_messages
from penstock.cluster.proxies import SERVERS
from penstock.cluster.wire import MISSING, answer_raised, answer_with, pack, unpack
from penstock.errors import DeadlineExceeded, RunError
from penstock.events import Warned
from penstock.garbage import keep_what_is_loaded
from penstock.ports import Description, build_here

T = TypeVar("T")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])

CONTROL = "control"
MAX_CALLS = 100_000
"""Calls of Ray's at a time in one actor: one for each process that waits for answers, and the lists that come."""
MAX_CONTROL_CALLS = 1_000
OBSERVER = "observer"
"""The port of the driver that every actor may tell events."""

current: Host | None = None
"""That of this process, if it is an actor."""


def pack_luggage(description: Description, ports: Mapping[str, Any]) -> bytes:
    """What an actor needs to build an object: where to find modules, then the object itself.

    Classes and functions go by name. Those of a configuration file that no name leads to go by value.
    """
    by_value = [module for name, module in sys.modules.items() if name.startswith("penstock_configuration_")]
    with contextlib.ExitStack() as stack:
        for module in by_value:
            ray.cloudpickle.register_pickle_by_value(module)
            stack.callback(ray.cloudpickle.unregister_pickle_by_value, module)
        packed = ray.cloudpickle.dumps((description, dict(ports)), protocol=5)
    return pack(([entry or str(Path.cwd()) for entry in sys.path], packed))


def _build(luggage: bytes) -> Any:
    paths, packed = unpack(luggage)
    # Last, so that what is installed on this node comes first.
    sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]
    description, ports = unpack(packed)
    server = SERVERS[description.port](build_here(description, ports))
    keep_what_is_loaded()
    return server


def marked(**options: Any) -> Callable[[MethodT], MethodT]:
    """`ray.method`, with types."""
    mark: Callable[[MethodT], MethodT] = ray.method(**options)
    return mark


_control = marked(concurrency_group=CONTROL)


class Host:
    def __init__(self, name: str) -> None:
        global current
        current = self
        self.name = name
        self.outbox = Outbox()
        self._incarnation = uuid.uuid4().hex
        self.home: asyncio.AbstractEventLoop | None = None
        """Where the objects live."""
        self._parts: dict[str, asyncio.Task[Any]] = {}
        self._connections: dict[str, _Connection] = {}
        self._ending: list[asyncio.Task[None]] = []
        logging.getLogger("penstock").addHandler(_ToDriver(self))

    # Data.

    async def install(self, part: str, luggage: bytes) -> bytes:
        self.home = asyncio.get_running_loop()
        if part not in self._parts:
            self._parts[part] = asyncio.create_task(asyncio.to_thread(_build, luggage), name=f"build {part}")
        try:
            server = await asyncio.shield(self._parts[part])
        except Exception as error:
            self._parts.pop(part, None)
            return answer_raised(error)
        return answer_with(server.facts())

    async def incarnation(self) -> bytes:
        return self._incarnation.encode()

    async def post(self, line: str, incarnation: str, messages: bytes) -> bytes:
        """What somebody asks for. Empty when it is meant for the actor that was here before."""
        if incarnation != self._incarnation:
            return b""
        connection = self._connection(line)
        for message in decode_messages(messages):
            if isinstance(message, Answer):
                self.outbox.take(message)
            else:
                connection.answering.take(message)
        return b"taken"

    async def collect(self, line: str, incarnation: str, wait_s: float, attends: bool) -> bytes:
        """What was answered meanwhile, as soon as there is something; for the driver also what is called back."""
        if incarnation != self._incarnation:
            return b""
        return encode_messages(await self._connection(line).collect(wait_s, self.outbox if attends else None))

    async def _find(self, part: str) -> Any:
        return await asyncio.shield(self._parts[part]) if part in self._parts else None

    def _connection(self, line: str) -> _Connection:
        """Those that nobody collects from any more are ended, with what runs for them."""
        now = asyncio.get_running_loop().time()
        for name, other in list(self._connections.items()):
            if name != line and now > other.collected_at + COLLECT_S + SILENT_S:
                del self._connections[name]
                self._ending.append(asyncio.create_task(other.answering.drop(), name=f"end {name}"))
        self._ending = [task for task in self._ending if not task.done()]
        if line not in self._connections:
            self._connections[line] = _Connection(self._find, line)
        return self._connections[line]

    # Control.

    @_control
    async def control(self, part: str, method: str, arguments: bytes) -> bytes:
        if part not in self._parts or self.home is None:
            return MISSING
        return await self._at_home(self._call(part, method, arguments))

    async def _call(self, part: str, method: str, arguments: bytes) -> bytes:
        try:
            found = await self._find(part)
            return answer_with(await getattr(found, method)(*unpack(arguments)))
        except Exception as error:  # whatever it is, the caller must hear of it
            return answer_raised(error)

    @_control
    async def identify(self) -> tuple[str, int, str]:
        return self._incarnation, os.getpid(), ray.util.get_node_ip_address()

    async def _at_home(self, call: Coroutine[Any, Any, T]) -> T:
        """Objects belong to the loop of the data calls."""
        assert self.home is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self.home))


class _Connection:
    """To one process that calls: what it asked for, and what it has not collected yet."""

    def __init__(self, find: Callable[[str], Awaitable[Any]], name: str) -> None:
        self.answering = Answering(self._send, find, name)
        self._name = name
        self.collected_at = asyncio.get_running_loop().time()
        self._outgoing: list[Message] = []
        self._something = asyncio.Event()

    async def collect(self, wait_s: float, outbox: Outbox | None) -> list[Message]:
        loop = asyncio.get_running_loop()
        self.collected_at = loop.time() + wait_s
        self._outgoing += outbox.attended(self._name, self._something.set) if outbox is not None else []
        if not self._outgoing:
            self._something.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._something.wait()
            # What else this turn of the loop brings goes with it.
            await asyncio.sleep(0)
        if outbox is not None:
            self._outgoing += outbox.more(self._name, self._something.set)
        outgoing, self._outgoing = self._outgoing, []
        self.collected_at = loop.time()
        return outgoing

    def _send(self, message: Message) -> None:
        self._outgoing.append(message)
        self._something.set()


class _ToDriver(logging.Handler):
    """What parts of Penstock log is shown where the run is shown."""

    def __init__(self, host: Host) -> None:
        super().__init__(logging.WARNING)
        self._host = host

    def emit(self, record: logging.LogRecord) -> None:
        warned = Warned(text=f"{self._host.name}: {record.getMessage()}", source=record.name)
        self._host.outbox.tell(OBSERVER, "notice", (warned,))


def outbox() -> Outbox:
    """Of this actor."""
    if current is None:
        raise RunError("this process is no actor of Penstock's: it has no driver to call")
    return current.outbox


def call_from_thread(call: Coroutine[Any, Any, T]) -> T:
    """On the loop of this actor's objects, from the thread in which one of them is built; blocks. Raises
    DeadlineExceeded when the driver does not answer."""
    if current is None or current.home is None:
        raise RunError("this process is no actor of Penstock's")
    try:
        return asyncio.run_coroutine_threadsafe(call, current.home).result(SILENT_S)
    except TimeoutError:
        raise DeadlineExceeded(f"the driver has not answered for {SILENT_S:g} s") from None


RemoteHost = ray.remote(
    concurrency_groups={CONTROL: MAX_CONTROL_CALLS},
    max_concurrency=MAX_CALLS,
    max_restarts=-1,
    max_task_retries=0,
    enable_task_events=False,
)(Host)
