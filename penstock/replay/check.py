"""Whether the file is whole: its structure as SQLite sees it, and the checksums of all groups.

That costs what the file is large, which is what was ever trained. So a small ledger is checked as it is opened, a large
one beside the run: a restart looks at the rows that it needs in any case, and what is damaged among the others is
noticed within the first minutes and ends the run.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import LedgerError
from penstock.replay.disk import Connection
from penstock.replay.schema import GROUPS, WASTE, check_structure
from penstock.replay.table import DAMAGE, damaged

CHECKED_AT_ONCE = 16 << 20
"""Bytes of a ledger that is checked before it is opened; a fraction of a second."""

AT_ONCE = 256
PAUSE_S = 0.01
"""Between so many rows, for those who do not only check."""


def check_rows(connection: Connection, path: Path) -> None:
    """Raises LedgerError at the first row that does not have its checksum."""
    for _ in _rows(connection, path):
        pass


def _rows(connection: Connection, path: Path) -> Iterator[None]:
    """All groups and all waste, some at a time."""
    after, found = -1, AT_ONCE
    while found == AT_ONCE:
        found = 0
        for group in GROUPS.read(connection, path, "WHERE groups.sequence > ?", (after,), limit=AT_ONCE):
            after, found = after + 1, found + 1
            if group.sequence != after:
                raise damaged(path, f"group {after} of the order of draws is missing")
        yield
    for _ in WASTE.read(connection, path):
        pass


class Checking:
    """A check beside the run, in a thread and with a connection of its own. Begins at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stopping = threading.Event()
        self._connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        self.damage: LedgerError | None = None
        """What it found. Whoever records next raises it."""
        self._thread = threading.Thread(target=self._run, name="ledger-check", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._stopping.set()
        self._connection.interrupt()
        await asyncio.to_thread(self.wait)
        self._connection.close()

    def wait(self) -> None:
        """Until it is at its end, or was stopped."""
        self._thread.join()

    def _run(self) -> None:
        try:
            check_structure(self._connection, self._path)
            for _ in _rows(self._connection, self._path):
                if self._stopping.wait(PAUSE_S):
                    return
        except (LedgerError, *DAMAGE) as error:
            if not self._stopping.is_set():  # then it was only interrupted
                self.damage = error if isinstance(error, LedgerError) else damaged(self._path, str(error))
