"""Worker processes that run a user's function, each killed and replaced the moment it misbehaves.

A call holds one worker. A call that ends well gives its worker back; any other end (deadline, death, too much memory,
cancellation) kills the worker's whole process group and starts a replacement at once, so the pool never shrinks.
Waiting for a free worker does not count towards the call's own deadline.

Nothing here belongs to an event loop while no call runs, so one pool serves several loops one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.environment import child_environment
from penstock.judger import worker as worker_program
from penstock.judger.channel import Channel
from penstock.judger.failure import CallFailed
from penstock.judger.slots import NoSlot, Slots
from penstock.judger.worker import Arguments, Reply, Setup

WATCH_INTERVAL_S = 0.1
"""How often a running call's process is looked at: alive, and within its memory."""
PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_FRAME = 4 << 20
"""A worker's longest frame. Replies are checked in the worker; more than this is not a reply."""


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    num_workers: int = 2
    timeout_s: float = 30.0
    start_timeout_s: float = 60.0
    max_calls: int = 10_000
    max_memory: int = 2 << 30
    environment: tuple[str, ...] = ()
    """Names of variables that a worker sees besides what programs need to start and compute."""
    output: str | None = None
    """The file to which what the function prints is added; None: this process's standard error."""


def _opened(output: str | None) -> int:
    """Where a worker writes what is printed: the file, else this process's standard error, else nowhere."""
    if output is not None:
        # There may be no such place, such as on another machine.
        with contextlib.suppress(OSError):
            return os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    # None in a process that was started without one; its descriptor may be any file since.
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            return os.dup(2)
    return os.open(os.devnull, os.O_WRONLY)


def _take_note(task: asyncio.Task[Reply]) -> None:
    """A task given up on may still end in an error, which asyncio would report as never retrieved."""
    if not task.cancelled():
        task.exception()


class Worker:
    """One process and the channel to it."""

    def __init__(self, setup: Setup, environment: Sequence[str] = (), output: str | None = None) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        # Started from the loop's own thread: the kernel ends a worker with the thread that started it.
        printed = _opened(output)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(Path(worker_program.__file__)), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stderr=printed,
                env=child_environment(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()
            os.close(printed)
        self.calls = 0
        self._ready = False
        self._killed = False
        # Now, so that it loads the function while nobody waits. A fresh socket's buffer takes a frame this small.
        with contextlib.suppress(OSError):  # it died already; the first read says so
            self._channel.send_at_once(msgspec.msgpack.encode(setup))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def get_ready(self, timeout: float) -> None:
        """Wait until the function is loaded; at once after the first time."""
        if self._ready:
            return
        reply = await self._within(
            self._receive(), timeout, CallFailed("start", f"the worker was not ready within {timeout:g} s")
        )
        if "failed" in reply:
            reason = f"the worker could not load the function: {reply['failed']}"
            raise CallFailed("start", reason, way=reason, detail=reply.get("detail", ""), plain_bug=True)
        self._ready = True

    async def call(self, arguments: bytes, timeout: float, max_memory: int) -> Reply:
        """One call; the worker may be used again only if this returns."""
        self.calls += 1
        late = CallFailed("timeout", f"no answer within {timeout:g} s; the worker was killed")
        return await self._within(self._exchange(arguments), timeout, late, max_memory)

    async def _within(
        self, exchange: Coroutine[Any, Any, Reply], timeout: float, late: CallFailed, max_memory: int = sys.maxsize
    ) -> Reply:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        task = loop.create_task(exchange, name=f"judger worker {self.process.pid}")
        task.add_done_callback(_take_note)
        try:
            while not task.done():
                left = until - loop.time()
                if left <= 0:
                    raise late
                await asyncio.wait({task}, timeout=min(left, WATCH_INTERVAL_S))
                if not task.done():
                    self._look(max_memory)
            return task.result()
        except (OSError, EOFError):
            raise CallFailed("worker_death", f"worker died: {await self._last_words()}") from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise CallFailed("worker_death", f"worker died: it answered nonsense ({error})") from None
        finally:
            if not task.done():
                task.cancel()

    def _look(self, max_memory: int) -> None:
        if not self.alive:  # a child of the reward function may hold the channel open
            raise ConnectionError
        if (memory := self.memory()) > max_memory:
            raise CallFailed("memory", f"worker used {memory >> 20} MiB; at most {max_memory >> 20} are allowed")

    async def _exchange(self, arguments: bytes) -> Reply:
        await self._channel.send(msgspec.msgpack.encode([self.calls, msgspec.Raw(arguments)]))
        reply = await self._receive()
        if reply.get("call") != self.calls:  # something the last call left behind wrote to the channel
            raise ValueError("a reply to another call")
        return reply

    async def _receive(self) -> Reply:
        return msgspec.msgpack.decode(await self._channel.receive(MAX_FRAME), type=Reply)

    async def _last_words(self) -> str:
        """How the process ended. Its channel closes a moment before its exit status can be had."""
        await wait_until_gone([self], 0.5)
        code = self.process.returncode
        if code is None:
            return "it closed its channel"
        if code < 0:
            return f"killed by {signal.strsignal(-code) or 'a signal'} (signal {-code})"
        return f"exit status {code}"

    def memory(self) -> int:
        """Resident bytes; 0 where the system does not say."""
        try:
            statm = os.open(
                f"/proc/{self.process.pid}/statm", os.O_RDONLY
            )  # after every call: pathlib takes four times as long
        except OSError:
            return 0
        try:
            pages = os.read(statm, 256).split()[1]
        except (OSError, IndexError):
            return 0
        finally:
            os.close(statm)
        return int(pages) * PAGE

    def kill(self) -> None:
        """End the process and all it started. Never waits; a second call does nothing, its id may be another's then."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._channel.close()
        self.process.poll()


class Process(Protocol):
    @property
    def alive(self) -> bool:
        """Asking buries the dead."""
        ...


async def wait_until_gone(workers: Sequence[Process], timeout: float) -> bool:
    """Reap these processes. The system offers no portable way to wait for several, so it is asked often."""
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout
    while any(worker.alive for worker in workers):
        if loop.time() >= until:
            return False
        await asyncio.sleep(0.005)
    return True


def _kill_at_exit(owner: int, workers: set[Worker], dying: set[Worker]) -> None:
    if os.getpid() != owner:  # a forked child ends; the workers are not its own
        return
    for worker in workers:
        worker.kill()
    for worker in (*workers, *dying):
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=1.0)


class WorkerPool:
    """Up to `limits.num_workers` processes, started when first needed."""

    def __init__(self, setup: Setup, limits: PoolLimits) -> None:
        self._setup = setup
        self._limits = limits
        self._slots = Slots(limits.num_workers)
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._dying: set[Worker] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.replaced = 0
        weakref.finalize(self, _kill_at_exit, os.getpid(), self._workers, self._dying)

    async def call(self, arguments: Arguments, wait_until: float) -> Reply:
        """Run the function in a worker. Waits for a free one until the loop's time `wait_until`. Raises CallFailed."""
        try:
            request = msgspec.msgpack.encode(arguments)
        except (TypeError, ValueError, OverflowError) as error:
            raise CallFailed("start", f"an argument cannot be sent to a worker: {error}") from None
        self._forget_other_loops()
        try:
            async with self._slots.take(wait_until):
                return await self._call(request)
        except NoSlot:
            raise CallFailed("busy", f"no worker was free; all {self._limits.num_workers} had calls before") from None

    async def _call(self, request: bytes) -> Reply:
        worker = self._take()
        keep = False
        try:
            await worker.get_ready(self._limits.start_timeout_s)
            reply = await worker.call(request, self._limits.timeout_s, self._limits.max_memory)
            keep = (
                worker.calls < self._limits.max_calls
                and worker.memory() <= self._limits.max_memory
                and not reply.get("out_of_memory")
            )
            return reply
        except CallFailed:
            if self._closed:
                raise CallFailed("closed", "the judger was closed during the call") from None
            raise
        finally:
            if keep and not self._closed:
                self._idle.append(worker)
            else:
                self._replace(worker)

    def _take(self) -> Worker:
        if self._closed:
            raise CallFailed("closed", "the judger is closed")
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            self._bury(worker)
        try:
            return self._start()
        except OSError as error:
            raise CallFailed("start", f"no worker process could be started: {error}") from None

    def _start(self) -> Worker:
        worker = Worker(self._setup, self._limits.environment, self._limits.output)
        self._workers.add(worker)
        return worker

    def _replace(self, worker: Worker) -> None:
        self._bury(worker)
        if self._closed:
            return
        self.replaced += 1
        with contextlib.suppress(OSError):  # then the next call tries, and says why it fails
            self._idle.insert(0, self._start())

    def _bury(self, worker: Worker) -> None:
        worker.kill()
        self._workers.discard(worker)
        self._dying.add(worker)
        self._dying.intersection_update({other for other in self._dying if other.alive})

    def _forget_other_loops(self) -> None:
        """Calls of a loop that was closed under them never gave their workers back."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            for worker in self._workers - set(self._idle):
                self._bury(worker)

    async def close(self) -> None:
        """Kill every worker; returns when they are gone, after at most a second. Calls under way fail."""
        self._closed = True
        workers = [*self._workers, *self._dying]
        for worker in workers:
            worker.kill()
        self._idle.clear()
        self._workers.clear()
        await wait_until_gone(workers, 1.0)
        self._dying.clear()
