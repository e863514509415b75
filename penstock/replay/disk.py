"""How the ledger reaches SQLite. Fault injection replaces this and nothing else."""

from __future__ import annotations

import functools
import re
import sqlite3
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

ROWS_PER_STATEMENT = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Few sizes, so that their statements stay compiled."""


class Connection(Protocol):
    """The part of `sqlite3.Connection` that the ledger uses."""

    @property
    def total_changes(self) -> int: ...

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> sqlite3.Cursor: ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> sqlite3.Cursor: ...

    def close(self) -> None: ...


class Disk(Protocol):
    def connect(self, path: Path) -> Connection: ...


class ManyRowsConnection(sqlite3.Connection):
    """Writes many rows with one statement.

    SQLite works without the interpreter's lock and takes it back after every statement, for which a busy event loop
    lets it wait for milliseconds. A statement per row would wait as often as there are rows.
    """

    def executemany(  # type: ignore[override]  # rows are sequences
        self, sql: str, parameters: Iterable[Sequence[Any]], /
    ) -> sqlite3.Cursor:
        """`sql` has one `VALUES (?, ...)`; it sees all rows of a statement at once, not one after the other."""
        rows = parameters if isinstance(parameters, list) else list(parameters)
        cursor, start = self.cursor(), 0
        for size in ROWS_PER_STATEMENT:
            while len(rows) - start >= size:
                cursor.execute(_with_rows(sql, size), tuple(chain.from_iterable(rows[start : start + size])))
                start += size
        return cursor


@functools.lru_cache(maxsize=256)
def _with_rows(sql: str, n: int) -> str:
    return re.sub(r"VALUES (\([?, ]+\))", lambda found: f"VALUES {', '.join([found[1]] * n)}", sql, count=1)


class SqliteDisk:
    """Write-ahead log, and an fsync at every commit: a commit that returned survives a power failure."""

    def connect(self, path: Path) -> Connection:
        # Autocommit: transactions are begun and ended in words. The writer's thread takes the connection over.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=ManyRowsConnection)
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
