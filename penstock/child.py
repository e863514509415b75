"""A process of Penstock's own: the socket to it, the last lines it wrote, and how it ended.

    python -m <program> <descriptor of the socket> <process id of the parent>
    python -P <program.py> ...      where its Python has no Penstock

It ends with its parent: the kernel sees to it on Linux, the closed socket elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping

LAST_LINES = 20
_LINE_LIMIT = 2000


class Child:
    """As its parent sees it. Belongs to the event loop it was started in."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self.process = process
        self._channel = channel
        self._writer: asyncio.StreamWriter | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._listening = asyncio.create_task(self._listen(), name=f"stderr of {process.pid}")

    @classmethod
    async def start(cls, program: str, *, python: str, environment: Mapping[str, str]) -> Child:
        """Raises OSError when it cannot be started. From a thread that lives on: the kernel ends a child with it."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *child_command(program, python, theirs),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours)

    async def connect(self, *, limit: int = 1 << 16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """`limit` is that of a line."""
        reader, self._writer = await asyncio.open_connection(sock=self._channel, limit=limit)
        return reader, self._writer

    async def story(self) -> str:
        """How it ended. One that closed its socket and lives on is of no use: it is killed."""
        try:
            async with asyncio.timeout(1.0):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()
        await asyncio.wait([self._listening], timeout=1.0)
        code = self.process.returncode
        assert code is not None
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"{how}{self.last_words()}"

    def last_words(self) -> str:
        return "".join(f"\n  {line}" for line in self._lines)

    async def end(self, *, grace_s: float) -> None:
        """Close the socket, and kill it when it is still there after `grace_s`. It is gone when this returns."""
        if self._writer is not None:
            self._writer.close()
        else:
            self._channel.close()
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        except TimeoutError:
            pass
        finally:
            self.kill()  # also when this is cancelled; harmless when it is gone
        await self.process.wait()
        await asyncio.wait([self._listening], timeout=1.0)
        self._listening.cancel()

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def _listen(self) -> None:
        assert self.process.stderr is not None
        rest = b""
        while chunk := await self.process.stderr.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-_LINE_LIMIT:]
            self._lines.extend(line[-_LINE_LIMIT:].decode(errors="replace") for line in lines if line.strip())
        if rest.strip():
            self._lines.append(rest.decode(errors="replace"))


_RUN_MODULE = (
    "import sys; sys.flags.safe_path or sys.path.append(sys.path.pop(0)); import runpy; del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""As `-m` does, but the working directory comes last: a `torch.py` there does not stand in for the library."""


def child_command(program: str, python: str, theirs: socket.socket) -> list[str]:
    # -P: what stands beside a program is not for it to import.
    run = ["-P", program] if program.endswith(".py") else ["-c", _RUN_MODULE, program]
    return [python, *run, str(theirs.fileno()), str(os.getpid())]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def socket_to_parent(descriptor: int, parent: int) -> socket.socket:
    """In the child, before anything else. From now on it dies with its parent, and what it prints goes to stderr."""
    die_with_parent(parent)
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    return socket.socket(fileno=descriptor)


def die_with_parent(parent: int) -> None:
    """One that is busy does not see that the socket closed, so the kernel tells it."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)
