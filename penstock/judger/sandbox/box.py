"""Sandbox: one process that runs one job, and what it reports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.judger.channel import Channel
from penstock.judger.failure import CallFailed
from penstock.judger.sandbox.walls import Walls, start, unprivileged_user

MAX_REPORT = 16 << 20


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a keeper saw of one run."""

    run: int
    ended: Literal["", "timeout", "memory", "output", "files"]
    """Which limit ended it; empty: it ended by itself."""
    status: int
    """Of the process, as Python has it: negative for a signal."""
    stdout: bytes
    stderr: str
    result: bytes
    seconds: float

    def failure(self) -> str:
        """Why the run was no success, in words; empty when it was."""
        if self.ended:
            return {
                "timeout": "it took too long",
                "memory": "it used too much memory",
                "output": "it printed too much",
                "files": "it wrote too much",
            }[self.ended]
        if self.status < 0:
            return f"it was killed by {signal.strsignal(-self.status) or f'signal {-self.status}'}"
        last = next((line.strip() for line in reversed(self.stderr.splitlines()) if line.strip()), "")
        return f"it ended with status {self.status}{f': {last[:200]}' if last else ''}" if self.status else ""


class Sandbox:
    """Starts at once; used once. Raises CallFailed where the machine, and not the code, is the cause."""

    def __init__(self, walls: Walls) -> None:
        self._walls = walls
        uid = unprivileged_user()
        self._user = os.getuid() if uid is None else uid
        self._workdir: Path | None = None
        if not walls.namespaces:
            self._workdir = Path(tempfile.mkdtemp(prefix="penstock-run-"))
            if uid is not None:
                os.chown(self._workdir, uid, uid)
        ours, theirs = socket.socketpair()
        # Started from the loop's own thread: the kernel ends a sandbox with the thread that started it.
        try:
            self.process = start(walls, theirs.fileno(), self._workdir, uid)
        except OSError:
            ours.close()
            self._remove_workdir()
            raise
        finally:
            theirs.close()
        self._channel = Channel(ours)
        self._ready = False
        self.killed = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def get_ready(self, timeout_s: float) -> None:
        if self._ready:
            return
        answer = await self._receive(timeout_s, f"the sandbox was not ready within {timeout_s:g} s")
        if b'"ready"' not in answer[:40]:
            raise CallFailed("start", f"the sandbox did not start: {answer[:200]!r}")
        self._ready = True

    async def begin(
        self, job: dict[str, Any], *, timeout_s: float, cpu_s: float, peer: socket.socket | None = None
    ) -> None:
        """Give it its job: a role, the code, inputs of which each is one run. The limits are those of one run; `peer`
        leads to another sandbox."""
        job = {**job, "paths": self._walls.paths, "limits": self._walls.limits(timeout_s=timeout_s, cpu_s=cpu_s)}
        try:
            body = msgspec.json.encode(job)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a lone surrogate, say
            raise CallFailed("start", f"it cannot be sent to a sandbox: {error}", may_pass=False) from None
        try:
            await self._channel.send(body, None if peer is None else peer.fileno())
        except OSError as error:
            raise CallFailed("worker_death", f"the sandbox died: {error}; {self._last_words()}") from None

    async def report(self, timeout_s: float) -> Report:
        """Of the next run."""
        body = await self._receive(timeout_s, f"no report from the sandbox within {timeout_s:g} s")
        try:
            return msgspec.json.decode(body, type=Report)
        except (msgspec.DecodeError, RecursionError) as error:
            raise CallFailed("worker_death", f"the sandbox reported nonsense: {error}: {body[:200]!r}") from None

    async def _receive(self, timeout_s: float, late: str) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._channel.receive(MAX_REPORT)
        except TimeoutError:
            raise CallFailed("worker_death", late) from None
        except (OSError, EOFError, ValueError) as error:
            raise CallFailed(
                "worker_death", f"the sandbox died ({error or 'it ended'}); {self._last_words()}"
            ) from None

    def _last_words(self) -> str:
        """What it wrote before it ended, as far as it can be had without waiting."""
        stderr = self.process.stderr
        if stderr is None or stderr.closed:
            return ""
        os.set_blocking(stderr.fileno(), False)
        return (stderr.read() or b"").decode(errors="replace").strip()[-300:]

    def kill(self) -> None:
        """End the process and all it started. Never waits; a second call does nothing, its id may be another's then."""
        if self.killed:
            return
        self.killed = True
        if self._walls.namespaces:  # its other processes die with the first
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._channel.close()  # the keeper ends everything and itself then
        if self.process.stderr is not None:
            self.process.stderr.close()
        self.process.poll()

    def clear(self) -> None:
        """Once it is dead, or should be: end what is left of it and remove what it wrote."""
        if not self._walls.namespaces:
            _kill_session(self.process.pid, self._user)
        self.process.poll()
        self._remove_workdir()

    def _remove_workdir(self) -> None:
        if self._workdir is None:
            return
        with contextlib.suppress(RecursionError):
            shutil.rmtree(self._workdir, ignore_errors=True)
        if self._workdir.exists():  # as deep as code could make it before it was ended
            subprocess.run(["rm", "-rf", "--", str(self._workdir)], check=False, capture_output=True)


def _kill_session(session: int, user: int) -> None:
    """Without a process namespace: code can leave neither the session that its keeper began nor its user."""
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                pid = int(directory.name)
                if os.getsid(pid) == session and directory.stat().st_uid == user:
                    os.kill(pid, signal.SIGKILL)
