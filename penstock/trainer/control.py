"""The engines of a run that is under way, asked and changed from outside: `penstock engines RUN`.

A Unix socket in the run directory, for the user who owns the run; one JSON line asks, one answers. A caller who leaves
before the answer takes the wish back: an engine that was about to join does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from penstock.errors import PenstockError, RefusedError, RunError
from penstock.events import Note, Observer
from penstock.ports import EngineMember, Engines

SOCKET = "control.sock"
MAX_LINE = 1 << 16
ASK_TIMEOUT_S = 10.0
"""For a caller to say what he wants, and to read the answer."""
ANSWER_TIMEOUT_S = 900.0
"""For the run to answer: longer than an engine may take to start."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    do: Literal["list", "add", "drain"] = "list"
    name: str = ""
    """Of the engine to drain."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    members: list[EngineMember] = []
    """As they are afterwards."""
    name: str = ""
    """Of the engine that joined or left."""
    error: str = ""


class EngineControl:
    """Answers from `open` to `close`. `fixed` says why engines cannot come and go, where they cannot."""

    def __init__(self, run_dir: Path, engines: Engines, observer: Observer, *, fixed: str = "") -> None:
        self._run_dir = run_dir
        self._engines = engines
        self._observer = observer
        self._fixed = fixed
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """A run goes on without it where there can be none: then it is said."""
        try:
            listening = await asyncio.to_thread(_listen, self._run_dir)
            self._server = await asyncio.start_unix_server(self._answer, sock=listening, limit=MAX_LINE)
        except (OSError, AttributeError) as error:  # no Unix sockets here, or none in this file system
            self._observer.notice(Note(text=f"`penstock engines {self._run_dir}` will not work: {error}"))

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        with contextlib.suppress(OSError):
            (self._run_dir / SOCKET).unlink()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                line = await reader.readline()
            outcome = await self._while_there(reader, line)
            async with asyncio.timeout(ASK_TIMEOUT_S):
                writer.write(msgspec.json.encode(outcome) + b"\n")
                await writer.drain()
        except (TimeoutError, OSError, ValueError):
            pass  # the caller left, or never said anything
        finally:
            self._answering.discard(task)
            writer.close()

    async def _while_there(self, reader: asyncio.StreamReader, line: bytes) -> Outcome:
        """Raises ConnectionError when the caller leaves first; the wish is then taken back."""
        working = asyncio.create_task(self._carry_out(line), name="engine control")
        leaving = asyncio.create_task(reader.read(1), name="engine control, caller")
        try:
            await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ConnectionError("the caller left")
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _carry_out(self, line: bytes) -> Outcome:
        try:
            wish = msgspec.json.decode(line, type=Wish)
            name = await self._change(wish)
            return Outcome(members=await self._engines.members(), name=name)
        except (PenstockError, msgspec.MsgspecError) as error:
            return Outcome(error=str(error))

    async def _change(self, wish: Wish) -> str:
        if wish.do == "list":
            return ""
        if self._fixed:
            raise RunError(self._fixed)
        if wish.do == "add":
            name = await self._engines.add_engine()
            self._observer.notice(Note(text=f"{name} joined, as `penstock engines` asked"))
            return name
        await self._engines.drain_engine(wish.name)
        self._observer.notice(Note(text=f"{wish.name} left, as `penstock engines` asked"))
        return wish.name


def ask(run_dir: Path, wish: Wish, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Outcome:
    """What the run in this directory answers.

    Raises RefusedError when none is under way there, RunError when it did not do it.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection, _address(run_dir) as address:
            connection.settimeout(timeout_s)
            connection.connect(address)
            connection.sendall(msgspec.json.encode(wish) + b"\n")
            with connection.makefile("rb") as answer:
                line = answer.readline()
    except TimeoutError:
        raise RunError(f"the run in {run_dir} did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise RefusedError(f"no run is under way in {run_dir}, on this machine and by this user: {error}") from None
    if not line:
        raise RunError(f"the run in {run_dir} ended before it answered")
    outcome = msgspec.json.decode(line, type=Outcome)
    if outcome.error:
        raise RunError(outcome.error)
    return outcome


def _listen(run_dir: Path) -> socket.socket:
    """Nobody else can connect: it listens only when its permissions are set."""
    # Of a run that was killed: whoever has the run directory's lock is alone here.
    (run_dir / SOCKET).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    try:
        with _address(run_dir) as address:
            listening.bind(address)
        (run_dir / SOCKET).chmod(0o600)
        listening.listen()
    except BaseException:
        listening.close()
        raise
    return listening


@contextlib.contextmanager
def _address(run_dir: Path) -> Iterator[str]:
    """An address may have 107 bytes; through a descriptor of the directory it has few, however deep that is."""
    if sys.platform != "linux":
        yield str(run_dir / SOCKET)
        return
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)
