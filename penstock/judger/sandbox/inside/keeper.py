"""The first process of a sandbox. It runs code in children, ends them when they exceed a limit, and tells the outside.

Frames are a 4-byte length and JSON, over one socket.

    keeper -> outside   {"ready": true} once, then one report per run
    outside -> keeper   one job: a role, the code, the inputs, the limits; for two roles a socket to another sandbox

A sandbox is for one job: whatever the code did to it, nobody uses it again. Where there is a process namespace the
keeper is its process 1, which nobody inside can kill; its memory can be read by nobody, and its socket is closed in
its children. So what it reports is what it saw. What it saw may still be a lie of the code about itself, which is why
the right answers are never sent here.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from . import guard, guest, library, tester, wire

MAX_FRAME = 64 << 20
TICK_S = 0.02
"""How often a run is looked at."""
MAX_STDERR = 4000
PAGE = 4096
MAX_DEPTH = 50
"""Of directories, where they are those of the machine."""
PRELOADED = "bisect collections copy functools heapq itertools json math operator random re string typing"
"""What most programs import; children have them at once."""


class Channel:
    """To the outside."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.socket.set_inheritable(False)

    def send(self, message: Any) -> None:
        body = wire.dumps(message)
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def receive(self) -> tuple[Any, list[int]]:
        """A message, and the descriptors that came with it. Ends the process when the outside is gone."""
        descriptors: list[int] = []
        head = b""
        while len(head) < 4:
            piece, passed, _, _ = socket.recv_fds(self.socket, 4 - len(head), 2)
            descriptors += passed
            if not piece:
                os._exit(0)
            head += piece
        (size,) = struct.unpack(">I", head)
        if size > MAX_FRAME:
            os._exit(0)
        body = bytearray()
        while len(body) < size:
            chunk = self.socket.recv(min(size - len(body), 1 << 20))
            if not chunk:
                os._exit(0)
            body += chunk
        return wire.loads(bytes(body)), descriptors


class Watched:
    """A descriptor that is read up to a limit."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor = descriptor
        self.limit = limit
        self.read = bytearray()
        self.over = False
        os.set_blocking(descriptor, False)

    def take(self) -> bool:
        """Read what is there; False when it is closed."""
        try:
            chunk = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        room = self.limit - len(self.read)
        self.over = self.over or len(chunk) > room
        self.read += chunk[:room]
        return bool(chunk)


class Run:
    """One child that runs the code, until it has ended and everything it started has."""

    def __init__(self, body: Callable[[int], None], limits: guard.Limits, stdin: bytes, keep: int | None) -> None:
        """`body` gets a descriptor to write its result to. `keep` stays open in the child."""
        self._limits = limits
        outputs = [os.pipe() for _ in range(3)]
        self._out, self._err, self._result = (
            Watched(read, limit)
            for (read, _), limit in zip(outputs, (limits.max_output, MAX_STDERR, limits.max_output), strict=True)
        )
        given = _as_file(stdin)
        self._started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            _be_the_child(body, limits, [given, *(write for _, write in outputs)], keep)
        with contextlib.suppress(OSError):  # it did so itself already
            os.setpgid(self.pid, self.pid)
        for descriptor in (given, *(write for _, write in outputs)):
            os.close(descriptor)
        self._status: int | None = None
        self.ended = ""
        """Why it was ended: timeout, memory, output, files; empty when it ended by itself."""

    def wait(self, outside: socket.socket) -> dict[str, Any]:
        """What happened. Ends the run and this process when the outside is gone."""
        watched = {one.descriptor: one for one in (self._out, self._err, self._result)}
        poll = select.poll()
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        poll.register(outside, 0)
        # Readable when the child has ended, which is a moment after its pipes are closed.
        child = _pidfd(self.pid)
        if child is not None:
            poll.register(child, select.POLLIN)
        while not self.ended and self._status is None:
            for descriptor, event in poll.poll(TICK_S * 1000):
                if descriptor == outside.fileno():
                    self._end_all()
                    os._exit(0)
                one = watched.get(descriptor)
                if one is not None and not (event & select.POLLIN and one.take()):
                    poll.unregister(descriptor)
            self._look()
        if child is not None:
            os.close(child)
        self._end_all()
        for one in watched.values():
            # What was written before the end; nobody writes any more.
            while len(one.read) < one.limit and one.take():
                if not select.select([one.descriptor], [], [], 0)[0]:
                    break
            os.close(one.descriptor)
        if not self.ended and (self._out.over or self._result.over):
            self.ended = "output"
        if not self.ended and self._wrote_too_much():
            self.ended = "files"
        if not self.ended and self._status == -signal.SIGXCPU:
            self.ended = "timeout"
        return {
            "ended": self.ended,
            "status": self._status if self._status is not None else 0,
            "stdout": base64.b64encode(self._out.read).decode(),
            "stderr": self._err.read.decode("utf-8", "replace")[-MAX_STDERR:],
            "result": base64.b64encode(self._result.read).decode(),
            "seconds": time.monotonic() - self._started,
        }

    def _look(self) -> None:
        self._reap(os.WNOHANG)
        if self._status is not None:
            return
        if time.monotonic() - self._started > self._limits.timeout_s:
            self.ended = "timeout"
        elif self._out.over or self._result.over:
            self.ended = "output"
        elif self._memory() > self._limits.max_memory:
            self.ended = "memory"
        elif self._wrote_too_much():
            self.ended = "files"

    def _wrote_too_much(self) -> bool:
        """A file counts as a page at least: many empty ones fill a disk, or the kernel's memory, too."""
        if not self._limits.namespaces:
            return _bytes_under(os.getcwd(), self._limits.max_files_bytes) > self._limits.max_files_bytes
        system = os.statvfs("/tmp")
        return (system.f_files - system.f_ffree) * PAGE > self._limits.max_files_bytes

    def _reap(self, option: int) -> bool:
        """Bury the dead, those too whose parent died first; False when there is nobody left."""
        while True:
            try:
                pid, status = os.waitpid(-1, option)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self._status = os.waitstatus_to_exitcode(status)

    def _memory(self) -> int:
        """Resident bytes of all processes of the run; 0 where the system does not say."""
        page, total = os.sysconf("SC_PAGE_SIZE"), 0
        try:
            names = os.listdir("/proc")
        except OSError:
            return 0
        for name in names:
            if name.isdigit() and self._is_ours(int(name)):
                try:
                    with open(f"/proc/{name}/statm", "rb") as file:
                        total += int(file.read().split()[1]) * page
                except (OSError, IndexError, ValueError):
                    continue
        return total

    def _is_ours(self, pid: int) -> bool:
        if self._limits.namespaces:
            return pid != os.getpid()
        try:
            return os.getpgid(pid) == self.pid
        except OSError:
            return False

    def _end_all(self) -> None:
        """Everything that runs here, whoever started it."""
        while True:
            try:
                if self._limits.namespaces:
                    os.kill(-1, signal.SIGKILL)  # everybody in this process namespace but the keeper
                else:
                    os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            if not self._reap(os.WNOHANG):
                return
            time.sleep(0.001)


def _pidfd(pid: int) -> int | None:
    """None where the kernel has none: then the next tick finds out."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _as_file(content: bytes) -> int:
    """Readable from its beginning, without a writer that could block."""
    descriptor = os.memfd_create("stdin")
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _bytes_under(directory: str, enough: int) -> int:
    """Looks no further once it is more than `enough`, which a tree is that is too deep to be looked through."""
    total, found = 0, [(directory, 0)]
    while found:
        parent, depth = found.pop()
        try:
            with os.scandir(parent) as entries:
                for entry in entries:
                    total += max(PAGE, entry.stat(follow_symlinks=False).st_blocks * 512)
                    if entry.is_dir(follow_symlinks=False):
                        found.append((entry.path, depth + 1))
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:
            return enough + 1
        if total > enough or depth > MAX_DEPTH:
            return enough + 1
    return total


def _be_the_child(body: Callable[[int], None], limits: guard.Limits, ends: list[int], keep: int | None) -> None:
    """Never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        for number, descriptor in enumerate(ends[:3]):
            os.dup2(descriptor, number)
        wanted = [ends[3]] if keep is None else [ends[3], keep]
        # First out of the way of the numbers they get.
        moved = [os.dup(descriptor) for descriptor in wanted]
        high = [os.dup2(descriptor, 60 + place) for place, descriptor in enumerate(moved)]
        os.closerange(3, 60)
        os.closerange(60 + len(high), 1 << 12)
        for descriptor in high:
            os.set_inheritable(descriptor, False)
        guard.confine(limits)
        body(60)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        status = status or 1
    finally:
        os._exit(status & 0xFF)


def work(channel: Channel, job: dict[str, Any], descriptors: list[int]) -> None:
    limits = guard.Limits(**job["limits"])
    keep = descriptors[0] if descriptors else None
    sys.path[:0] = job.get("paths", ())
    for number, given in enumerate(job["inputs"]):
        stdin = base64.b64decode(given) if job["role"] == "program" else b""
        if job["role"] == "test":
            run = Run(lambda result: tester.test(job, result, 61), limits, stdin, keep)
        else:
            run = Run(lambda result, given=given: guest.act(job, given, result), limits, stdin, keep)  # type: ignore[misc]
        if keep is not None:
            os.close(keep)
        channel.send({"run": number, **run.wait(channel.socket)})


def main(descriptor: int, archive: str = "") -> None:
    """Never returns. Ends when the outside is gone. `archive` has the modules for code that may open no file."""
    # The first process of a namespace gets no signal from inside that it has no handler for.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.clear()
    guard.prctl(guard.PR_SET_DUMPABLE, 0)
    guard.prctl(guard.PR_SET_CHILD_SUBREAPER, 1)
    for name in PRELOADED.split():
        __import__(name)
    if archive:
        library.use(archive)
    gc.collect()
    gc.freeze()
    channel = Channel(descriptor)
    channel.send({"ready": True, "pid": os.getpid(), "uid": os.getuid()})
    job, descriptors = channel.receive()
    try:
        work(channel, job, descriptors)
        channel.receive()  # until the outside has read it all and goes
    except Exception as error:
        channel.send({"broken": f"{type(error).__name__}: {error}"[:500]})
    os._exit(0)
