"""Line: this process's calls to one actor, over two calls of Ray's: `post` takes what is asked, `collect` brings what
is answered.

A line is up as long as somebody waits for an answer. It is gone when the actor dies, is restarted or does not answer;
then everything that was asked fails with ActorGone, and the next call begins a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)

from penstock.cluster.peer import Answer, Answering, Asking, Message, decode_messages, encode_messages
from penstock.errors import InfrastructureFailure, RunError
from penstock.rollout import FailureReason

COLLECT_S = 10.0
"""How long an actor lets a look for answers wait before it says that there are none."""
SILENT_S = 120.0
"""After which one who does not answer, or does not ask, is taken for dead. Longer than code that blocks an event loop
may take."""

_GONE = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    OutOfMemoryError,
    ObjectLostError,
    ActorUnschedulableError,
    TaskCancelledError,
)


class ActorGone(InfrastructureFailure):
    """An actor died, or cannot be reached. Whether the call ran is not known."""

    def __init__(self, message: str, *, reason: FailureReason = FailureReason.ACTOR_DIED) -> None:
        super().__init__(message, reason=reason)


class Connection:
    """Of this process to its cluster; whoever waits for somebody there is told when all of it is gone."""

    def __init__(self) -> None:
        self.lost = ""
        """Why; empty while it is there."""
        self._waiting: list[Callable[[str], None]] = []
        self._lock = threading.Lock()

    def when_lost(self, tell: Callable[[str], None]) -> Callable[[], None]:
        """`tell` is called with the reason, in any thread. Returns what takes that back."""
        with self._lock:
            self._waiting.append(tell)
            lost = self.lost
        if lost:
            tell(lost)
        return lambda: self._forget(tell)

    def lose(self, words: str) -> None:
        """Nobody there answers any more: what is asked from now on fails at once. Of any thread."""
        with self._lock:
            self.lost, waiting = words, list(self._waiting)
        for tell in waiting:
            tell(words)

    def _forget(self, tell: Callable[[str], None]) -> None:
        with self._lock:
            self._waiting = [other for other in self._waiting if other is not tell]


_connection = Connection()


def new_connection() -> Connection:
    """One at a time: what is asked from now on is asked over it."""
    global _connection
    _connection = Connection()
    return _connection


def connection() -> Connection:
    return _connection


async def answered(name: str, method: Any, *arguments: Any) -> Any:
    """What an actor's method returns. Raises ActorGone; no exception of Ray's goes further than this."""
    if not ray.is_initialized():
        raise ActorGone(f"actor {name} is gone: the connection to its cluster was closed")
    if _connection.lost:
        raise ActorGone(f"actor {name} is gone: {_connection.lost}")
    ref = method.remote(*arguments)
    try:
        return await ref
    except asyncio.CancelledError:
        with contextlib.suppress(RayError):  # the connection may be closed already
            ray.cancel(ref)
        raise
    except _GONE as error:
        raise ActorGone(f"actor {name} is gone: {type(error).__name__}: {_first_line(error)}") from None
    except RayTaskError as error:
        raise RunError(f"actor {name} failed in Penstock's own code: {error}") from None
    except RayError as error:
        raise ActorGone(f"actor {name}: {type(error).__name__}: {_first_line(error)}") from None


class Line:
    """Belongs to the event loop that runs when it is made."""

    def __init__(self, name: str, handle: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self._name = name
        self._handle = handle
        self._asking = Asking(self._send)
        self._answering: Answering | None = None
        self._begin()

    def _begin(self) -> None:
        self._id = uuid.uuid4().hex
        self._incarnation = ""
        """Of the actor that has what was asked; empty before it is known."""
        self._outgoing: list[Message] = []
        self._posting: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[ActorGone] = self.loop.create_future()

    async def call(self, part: str, method: str, arguments: bytes) -> bytes:
        return await self._asking.call(part, method, arguments)

    def stream(self, part: str, method: str, arguments: bytes) -> AsyncGenerator[bytes, None]:
        return self._asking.stream(part, method, arguments)

    async def attend(self, answering: Answering) -> ActorGone:
        """Answer what the actor calls back, until it is gone; returns why."""
        self._answering = answering
        self._collect()
        gone = self._gone
        try:
            return await asyncio.shield(gone)
        finally:
            self._answering = None

    def send(self, message: Message) -> None:
        self._send(message)

    # Inside.

    def _send(self, message: Message) -> None:
        self._outgoing.append(message)
        if self._posting is None:
            self._posting = self.loop.create_task(self._post(), name=f"post to {self._name}")
        self._collect()

    async def _post(self) -> None:
        """All that this turn of the event loop asks for, and what comes while that is on its way."""
        me = self._posting
        try:
            while self._outgoing:
                async with asyncio.timeout(SILENT_S):
                    incarnation = await self._known_incarnation()
                    messages, self._outgoing = self._outgoing, []
                    posted = self._id, incarnation, encode_messages(messages)
                    if not await answered(self._name, self._handle.post, *posted):
                        raise ActorGone(f"actor {self._name} was restarted")
        except TimeoutError:
            self._lose(self._silent())
        except ActorGone as gone:
            self._lose(gone)
        except RunError as error:
            self._lose(ActorGone(str(error)))
        finally:
            if self._posting is me:
                self._posting = None

    def _collect(self) -> None:
        if self._collecting is None:
            self._collecting = self.loop.create_task(self._answers(), name=f"collect from {self._name}")

    async def _answers(self) -> None:
        me = self._collecting
        try:
            while self._asking or self._answering is not None:
                async with asyncio.timeout(COLLECT_S + SILENT_S):
                    incarnation = await self._known_incarnation()
                    looked = self._id, incarnation, COLLECT_S, self._answering is not None
                    messages = await answered(self._name, self._handle.collect, *looked)
                if not messages:
                    raise ActorGone(f"actor {self._name} was restarted")
                for message in decode_messages(messages):
                    self._take(message)
            # Nobody looks any more: the actor may be another one when it is asked again.
            self._incarnation = ""
        except TimeoutError:
            self._lose(self._silent())
        except ActorGone as gone:
            self._lose(gone)
        except RunError as error:
            self._lose(ActorGone(str(error)))
        finally:
            if self._collecting is me:
                self._collecting = None

    async def _known_incarnation(self) -> str:
        if not self._incarnation:
            self._incarnation = (await answered(self._name, self._handle.incarnation)).decode()
        return self._incarnation

    def _silent(self) -> ActorGone:
        return ActorGone(f"actor {self._name} has not answered for {SILENT_S:g} s")

    def _take(self, message: Message) -> None:
        if isinstance(message, Answer):
            self._asking.take(message)
        elif self._answering is not None:
            self._answering.take(message)

    def _lose(self, gone: ActorGone) -> None:
        old, collecting, posting = self._gone, self._collecting, self._posting
        self._begin()
        self._asking.fail(lambda: ActorGone(str(gone)))
        if not old.done():
            old.set_result(gone)
        for task in (collecting, posting):
            if task is not None and task is not asyncio.current_task():
                task.cancel()


_lines: weakref.WeakValueDictionary[str, Line] = weakref.WeakValueDictionary()


def line_to(name: str, handle: Any) -> Line:
    """The line of this process to an actor; one for all who call it."""
    actor = handle._actor_id.hex()
    line = _lines.get(actor)
    if line is None or line.loop is not asyncio.get_running_loop():
        line = _lines[actor] = Line(name, handle)
    return line


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no words").splitlines()[0]
