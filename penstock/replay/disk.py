"""How the ledger reaches SQLite. Fault injection replaces this and nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol


class Connection(Protocol):
    """The part of `sqlite3.Connection` that the ledger uses."""

    @property
    def total_changes(self) -> int: ...

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> sqlite3.Cursor: ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> sqlite3.Cursor: ...

    def close(self) -> None: ...


class Disk(Protocol):
    def connect(self, path: Path) -> Connection: ...


class SqliteDisk:
    """Write-ahead log, and an fsync at every commit: a commit that returned survives a power failure."""

    def connect(self, path: Path) -> Connection:
        # Autocommit: transactions are begun and ended in words. The writer's thread takes the connection over.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA busy_timeout = 5000")
            # A long reader lets the log grow; afterwards it shrinks to this.
            connection.execute("PRAGMA journal_size_limit = 67108864")
        except BaseException:
            connection.close()
            raise
        return connection
