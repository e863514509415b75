"""Calls between two processes that hand each other lists of messages, many at a time.

A call of Ray's costs half a millisecond of processor time on each side, whatever it carries. So calls are not calls of
Ray's: what one turn of the event loop asks for goes over in one message, and what is answered meanwhile comes back in
one. How the lists travel is not known here: see `line.py` for the asking side and `host.py` for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Container
from typing import Any, Literal

import msgspec

from penstock.cluster.wire import MISSING, RAISED, answer_raised, answer_with, pack, unpack

logger = logging.getLogger(__name__)

Wants = Literal["answer", "stream", "nothing"]
END = b"."
"""The last answer to a stream."""
DROP_S = 5.0
"""How long what runs for nobody may take to end; what ignores its cancellation is left behind."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="a", gc=False):
    number: int
    part: str
    method: str
    arguments: bytes
    wants: Wants


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="c", gc=False):
    """Nobody waits for this call any more."""

    number: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="r", gc=False):
    """To one's own call of this number: what `read_answer` reads, or END."""

    number: int
    answer: bytes


Message = Ask | Cancel | Answer
decode_messages = msgspec.msgpack.Decoder(list[Message]).decode
encode_messages = msgspec.msgpack.Encoder().encode


class Asking:
    """The side that calls. Belongs to one event loop; `send` takes a message along with the next list."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._streams: dict[int, asyncio.Queue[bytes | Exception]] = {}

    def __bool__(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._calls or self._streams)

    async def call(self, part: str, method: str, arguments: bytes) -> bytes:
        """The answer, as `read_answer` reads it, or MISSING. Cancelling cancels it on the other side."""
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._send(Ask(number, part, method, arguments, "answer"))
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(Cancel(number))
            raise
        finally:
            del self._calls[number]

    async def stream(self, part: str, method: str, arguments: bytes) -> AsyncGenerator[bytes, None]:
        """The answers, one by one. Closing it early cancels it on the other side."""
        number = next(self._numbers)
        answers: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._streams[number] = answers
        self._send(Ask(number, part, method, arguments, "stream"))
        ended = False
        try:
            while True:
                answer = await answers.get()
                if isinstance(answer, Exception):
                    ended = True
                    raise answer
                ended = answer == END or answer[:1] in (RAISED, MISSING)
                if answer == END:
                    return
                yield answer
        finally:
            del self._streams[number]
            if not ended:
                self._send(Cancel(number))

    def tell(self, part: str, method: str, arguments: tuple[Any, ...]) -> None:
        self._send(Ask(0, part, method, pack(arguments), "nothing"))

    def take(self, message: Answer) -> None:
        if (answer := self._calls.get(message.number)) is not None:
            if not answer.done():
                answer.set_result(message.answer)
        elif message.number in self._streams:
            self._streams[message.number].put_nowait(message.answer)

    def fail(self, error: Callable[[], Exception], *, but: Container[int] = ()) -> None:
        """All that waits but these: the other side is gone. An error for each, because they collect tracebacks."""
        for number, answer in self._calls.items():
            if number not in but and not answer.done():
                answer.set_exception(error())
        for number, answers in self._streams.items():
            if number not in but:
                answers.put_nowait(error())


class Answering:
    """The side that is called. `find` gives the object of a part, or None where there is none."""

    def __init__(self, send: Callable[[Message], None], find: Callable[[str], Awaitable[Any]], name: str) -> None:
        self._send = send
        self._find = find
        self._name = name
        self._running: dict[int, asyncio.Task[None]] = {}

    def take(self, message: Ask | Cancel) -> None:
        if isinstance(message, Cancel):
            if message.number in self._running:
                self._running[message.number].cancel()
            return
        run = self._told(message) if message.wants == "nothing" else self._answered(message)
        task = asyncio.create_task(run, name=f"{message.method} for {self._name}")
        number = message.number or -id(task)
        self._running[number] = task
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def drop(self) -> None:
        """Nobody waits for any of it."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=DROP_S)

    async def _told(self, message: Ask) -> None:
        try:
            getattr(await self._find(message.part), message.method)(*unpack(message.arguments))
        except Exception as error:
            logger.warning("%s told %s.%s in vain: %s", self._name, message.part, message.method, error)

    async def _answered(self, message: Ask) -> None:
        number = message.number
        try:
            found = await self._find(message.part)
            if found is None:
                self._send(Answer(number, MISSING))
                return
            method, arguments = getattr(found, message.method), unpack(message.arguments)
            if message.wants == "answer":
                self._send(Answer(number, answer_with(await method(*arguments))))
                return
            async with contextlib.aclosing(method(*arguments)) as pieces:
                async for piece in pieces:
                    self._send(Answer(number, answer_with(piece)))
            self._send(Answer(number, END))
        except asyncio.CancelledError:
            # Of use when it was not the asker who cancelled.
            self._send(Answer(number, answer_raised(RuntimeError(f"{message.method} was cancelled where it ran"))))
            raise
        except Exception as error:  # whatever it is, the asker must hear of it
            self._send(Answer(number, answer_raised(error)))
