"""The ledger's only writer: jobs in, durable transactions out.

`ThreadWriter` takes whatever is queued into one transaction, so that jobs which arrive together share one fsync.
It begins as soon as somebody waits, and after `LINGER_S` in any case. While one transaction waits for the disk the
next one gathers.

    event loop   submit -> queue (never blocks)          wait -> future ......................... acknowledged
    thread                   take all -> BEGIN -> apply -> COMMIT (fsync) -> call_soon_threadsafe --^

The first failure is final: everything submitted or waited for from then on raises StorageError with its cause. What
was acknowledged is in the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from penstock.errors import StorageError
from penstock.replay.disk import Connection

JobT = TypeVar("JobT", bound="Job")
TakenJobT = TypeVar("TakenJobT", bound="Job", contravariant=True)

MAX_JOBS_PER_TRANSACTION = 512
"""Bounds the time that one transaction makes the next job wait. As soon as so many are queued it begins."""

SWITCH_INTERVAL_S = 0.001
"""How long another thread may keep the interpreter from the writer, which needs it some ten times a transaction."""

LINGER_S = 0.002
"""How long a job that nobody waits for may lie, for others to share its fsync."""

NEXT_MOVES = {
    sqlite3.SQLITE_FULL: "free some space and resume",
    sqlite3.SQLITE_IOERR: "look at the kernel's log for the disk, then resume",
    sqlite3.SQLITE_READONLY: "make the run directory writable and resume",
}


class Job(Protocol):
    @property
    def size(self) -> int:
        """Bytes it holds while it is queued."""
        ...


Apply = Callable[[Connection, Sequence[JobT]], None]


class Writer(Protocol[TakenJobT]):
    def submit(self, job: TakenJobT) -> int:
        """Queue a job; returns its ticket. Never blocks. Raises StorageError after a failure."""
        ...

    async def wait(self, ticket: int) -> None:
        """Until the job of this ticket and all before it are durable. Raises StorageError after a failure."""
        ...

    async def close(self) -> None:
        """Write what is queued and close the connection. Idempotent."""
        ...


def write(connection: Connection, apply: Apply[JobT], jobs: Sequence[JobT]) -> None:
    """One transaction. Whatever goes wrong, the connection is left without one."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        apply(connection, jobs)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error, OSError):
            connection.execute("ROLLBACK")
        raise


def explain(path: Path, cause: BaseException) -> StorageError:
    code = getattr(cause, "sqlite_errorcode", None)
    move = (
        NEXT_MOVES.get(code & 0xFF, "resume when the cause is gone") if code is not None else "resume when it is gone"
    )
    error = StorageError(
        f"{path} cannot be written: {type(cause).__name__}: {cause}. What was acknowledged before is there; {move}"
    )
    error.__cause__ = cause
    return error


class InlineWriter(Generic[JobT]):
    """Every job its own transaction, in the caller's thread. For simulations: virtual time does not wait for a disk."""

    def __init__(self, connection: Connection, apply: Apply[JobT], path: Path) -> None:
        self._connection = connection
        self._apply = apply
        self._path = path
        self._ticket = 0
        self._cause: BaseException | None = None

    def submit(self, job: JobT) -> int:
        self._raise_failure()
        try:
            write(self._connection, self._apply, [job])
        except Exception as error:
            self._cause = error
            self._raise_failure()
        self._ticket += 1
        return self._ticket

    async def wait(self, ticket: int) -> None:
        self._raise_failure()

    async def close(self) -> None:
        self._connection.close()

    def _raise_failure(self) -> None:
        if self._cause is not None:
            raise explain(self._path, self._cause)


class ThreadWriter(Generic[JobT]):
    def __init__(
        self,
        connection: Connection,
        apply: Apply[JobT],
        path: Path,
        *,
        wait_timeout_s: float = 60.0,
        max_queued_bytes: int = 1 << 30,
    ) -> None:
        """A wait fails when the disk has taken nothing for `wait_timeout_s`, which is noticed within twice that time: a
        disk that hangs is a disk that failed.

        Memory is bounded by those who wait: a producer that waits for each group it stores has at most as many groups
        queued as it plays at once. `max_queued_bytes` is for one that does not: beyond it `submit` raises.

        Python's switch interval is lowered to `SWITCH_INTERVAL_S`, for the whole process.
        """
        self._connection = connection
        self._apply = apply
        self._path = path
        self._wait_timeout_s = wait_timeout_s
        self._max_queued_bytes = max_queued_bytes
        # The bare lock, where nothing is waited for: it is taken several times for each group.
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        # Below: guarded by the lock.
        self._queue: list[JobT] = []
        self._queued_bytes = 0
        self._submitted = 0
        self._durable = 0
        self._cause: BaseException | None = None
        self._told = False
        """Somebody heard of the failure."""
        self._closing = False
        self._hurry = False
        """Somebody waits for what is queued."""
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._round: asyncio.AbstractEventLoop | None = None
        """The loop that will begin a transaction in its next round. Its thread's alone."""
        self._watching: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        """The loops that look at times whether the disk still takes anything: one timer for all who wait there."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def submit(self, job: JobT) -> int:
        with self._lock:
            if self._cause is not None:
                self._raise_failure()
            if self._closing:
                raise StorageError(f"{self._path} is closed; nothing more can be recorded")
            queued = self._queued_bytes + job.size
            if queued > self._max_queued_bytes:
                raise StorageError(
                    f"{self._path}: the disk is {self._queued_bytes} bytes behind, more than {self._max_queued_bytes}; "
                    "use a faster disk, or play fewer groups at once"
                )
            self._queue.append(job)
            self._queued_bytes = queued
            self._submitted += 1
            length = len(self._queue)
            if length == 1 or length == MAX_JOBS_PER_TRANSACTION:
                self._hurry = self._hurry or length > 1
                self._condition.notify()
            return self._submitted

    async def wait(self, ticket: int) -> None:
        with self._lock:
            if self._cause is not None:
                self._raise_failure()
            if self._durable >= ticket:
                return
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._waiters.append((ticket, future))
        if self._round is not loop:
            # In the loop's next round: what the others who run in this one record shares the transaction.
            self._round = loop
            loop.call_soon(self._begin, loop)
        await future

    async def close(self) -> None:
        """Raises StorageError when what was queued could not be written and nobody was told before."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join, self._wait_timeout_s)
        if self._thread.is_alive():
            raise explain(self._path, TimeoutError(f"the writer did not end within {self._wait_timeout_s:g} s"))
        with self._condition:
            if not self._told:
                self._raise_failure()

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._round = None
        with self._condition:
            if self._queue and not self._hurry:
                self._hurry = True
                self._condition.notify()
        if loop not in self._watching:
            self._watching.add(loop)
            # Standing still begins at a look that found somebody waiting, never before.
            loop.call_later(self._wait_timeout_s / 2, self._look, loop, -1, False)

    def _look(self, loop: asyncio.AbstractEventLoop, durable: int, stood_still: bool) -> None:
        """Twice in a timeout: whether the disk took anything since the look before, while somebody waits."""
        with self._condition:
            if not self._waiters or self._cause is not None:
                self._watching.discard(loop)
                return
            now = self._durable
        still = now == durable
        if still and stood_still:
            self._fail(TimeoutError(f"the disk did not take a write within {self._wait_timeout_s:g} s"))
        else:
            loop.call_later(self._wait_timeout_s / 2, self._look, loop, now, still)

    # In the thread.

    def _run(self) -> None:
        try:
            while jobs := self._take():
                write(self._connection, self._apply, jobs)
                self._acknowledge(len(jobs))
        except BaseException as error:  # whatever it is, those who wait must hear of it
            self._fail(error)
        finally:
            try:
                self._connection.close()
            except (sqlite3.Error, OSError) as error:
                self._fail(error)

    def _take(self) -> list[JobT]:
        """What is queued; waits for the first job. Empty when the writer is to end."""
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self._closing or self._cause is not None)
            self._condition.wait_for(lambda: self._hurry or self._closing or self._cause is not None, LINGER_S)
            if self._cause is not None:
                return []
            jobs, self._queue = self._queue[:MAX_JOBS_PER_TRANSACTION], self._queue[MAX_JOBS_PER_TRANSACTION:]
            self._queued_bytes -= sum([job.size for job in jobs])
            self._hurry = self._hurry and bool(self._queue)
            return jobs

    def _acknowledge(self, n: int) -> None:
        with self._condition:
            self._durable += n
            if self._cause is not None:
                return
            ready = []
            while self._waiters and self._waiters[0][0] <= self._durable:
                ready.append(self._waiters.popleft()[1])
        _settle(ready, None)

    # Either side.

    def _fail(self, cause: BaseException) -> None:
        with self._condition:
            if self._cause is None:
                self._cause = cause
            failed = [future for _, future in self._waiters]
            self._told = self._told or bool(failed)
            self._waiters.clear()
            self._queue.clear()
            self._queued_bytes = 0
            self._condition.notify()
        _settle(failed, lambda: explain(self._path, cause))

    def _raise_failure(self) -> None:
        if self._cause is not None:
            self._told = True
            raise explain(self._path, self._cause)


def _settle(futures: list[asyncio.Future[None]], error: Callable[[], StorageError] | None) -> None:
    """Wake these futures in their loop, from any thread. Those who were cancelled or whose loop ended are gone."""

    def wake(mine: list[asyncio.Future[None]]) -> None:
        for future in mine:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error())

    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for future in futures:
        by_loop.setdefault(future.get_loop(), []).append(future)
    for loop, mine in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(wake, mine)
