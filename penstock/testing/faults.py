"""Faults of the disk: kill this process, or fail, at a chosen operation of the ledger or of a checkpoint.

    faults = Faults(at=17)                                  SIGKILL before operation 17, counted from 0
    faults = Faults(at=17, failure=DiskFailure.FULL)        that operation and all later ones fail, until `heal`
    build_trainer(..., disk=FaultyDisk(faults), files=FaultyFiles(faults))

One `Faults` may serve both: it counts what they do together. Without `at` it only counts.
"""

from __future__ import annotations

import enum
import errno
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.replay.disk import Connection, Disk, SqliteDisk
from penstock.trainer.files import Files
from penstock.unbuffered import FileSum

if TYPE_CHECKING:
    from torch import Tensor

READS = ("SELECT", "PRAGMA", "ROLLBACK")


class DiskFailure(enum.Enum):
    FULL = (errno.ENOSPC, sqlite3.SQLITE_FULL, "database or disk is full")
    IO = (errno.EIO, sqlite3.SQLITE_IOERR, "disk I/O error")
    READ_ONLY = (errno.EROFS, sqlite3.SQLITE_READONLY, "attempt to write a readonly database")

    def of_file(self, path: Path) -> OSError:
        number = self.value[0]
        return OSError(number, os.strerror(number), str(path))

    def of_sqlite(self) -> sqlite3.OperationalError:
        """As SQLite raises it."""
        _, code, message = self.value
        error = sqlite3.OperationalError(message)
        error.sqlite_errorcode = code
        return error


def kill_this_process() -> None:
    """SIGKILL: nothing is closed, flushed or said."""
    os.kill(os.getpid(), signal.SIGKILL)


class Faults:
    """Counts operations and acts at one of them. Operations may come from several threads."""

    def __init__(
        self, at: int | None = None, *, failure: DiskFailure | None = None, kill: Callable[[], None] = kill_this_process
    ) -> None:
        """Without a `failure` the process is killed; `kill` may do that in its own way."""
        self.count = 0
        self._at = at
        self._failure = failure
        self._kill = kill
        self._lock = threading.Lock()

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self._at = None

    def reached(self, *, writes: bool = True) -> DiskFailure | None:
        """One more operation is about to begin; returns how it is to fail. A failing disk can still be read."""
        with self._lock:
            number, self.count = self.count, self.count + 1
            if self._at is None or number < self._at:
                return None
            if self._failure is None:
                self._kill()
            return self._failure if writes else None


class FaultyDisk:
    """The ledger's disk. An operation is one statement, and the instant after a commit."""

    def __init__(
        self,
        faults: Faults,
        *,
        inner: Disk | None = None,
        on_commit: Callable[[list[Sequence[Any]]], None] | None = None,
    ) -> None:
        """`on_commit` gets the events that have just become durable, as rows of the ledger."""
        self._faults = faults
        self._inner = inner or SqliteDisk()
        self._on_commit = on_commit

    def connect(self, path: Path) -> Connection:
        return _FaultyConnection(self._inner.connect(path), self._faults, self._on_commit)


class _FaultyConnection:
    def __init__(
        self, real: Connection, faults: Faults, on_commit: Callable[[list[Sequence[Any]]], None] | None
    ) -> None:
        self._real = real
        self._faults = faults
        self._on_commit = on_commit
        self._events: list[Sequence[Any]] = []

    @property
    def total_changes(self) -> int:
        return self._real.total_changes

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> sqlite3.Cursor:
        self._operation(writes=not sql.startswith(READS))
        cursor = self._real.execute(sql, parameters)
        if sql == "COMMIT":
            events, self._events = self._events, []
            if self._on_commit is not None and events:
                self._on_commit(events)
            # Durable, and nobody knows yet. What fails here fails the next statement.
            self._faults.reached(writes=False)
        elif sql == "ROLLBACK":
            self._events = []
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> sqlite3.Cursor:
        self._operation(writes=True)
        rows = list(parameters)
        if sql.startswith("INSERT INTO events"):
            self._events += rows
        return self._real.executemany(sql, rows)

    def close(self) -> None:
        self._real.close()

    def _operation(self, *, writes: bool) -> None:
        failure = self._faults.reached(writes=writes)
        if failure is not None:
            raise failure.of_sqlite()


class FaultyFiles(Files):
    """The files of checkpoints. An operation is one call that changes the disk."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def mkdir(self, path: Path) -> None:
        self._operation(path)
        super().mkdir(path)

    def write(self, path: Path, content: bytes) -> None:
        self._operation(path)
        super().write(path, content)

    def write_tensors(self, path: Path, tensors: dict[str, Tensor]) -> FileSum:
        self._operation(path)
        return super().write_tensors(path, tensors)

    def flush(self, path: Path) -> None:
        self._operation(path)
        super().flush(path)

    def rename(self, path: Path, name: Path) -> None:
        self._operation(path)
        super().rename(path, name)

    def remove(self, path: Path) -> None:
        self._operation(path)
        super().remove(path)

    def rmdir(self, path: Path) -> None:
        self._operation(path)
        super().rmdir(path)

    def _operation(self, path: Path) -> None:
        failure = self._faults.reached()
        if failure is not None:
            raise failure.of_file(path)
