"""The tables of the ledger, its format version, and the checks on opening.

    groups    one row per drawn group: identity, and its state now
    events    every transition with its time; stays when contents are dropped. No index by group: a group's story is
              asked for by people, who can wait for a scan, and each transition would pay for it
    draws     a group's prompt and the ids of its rollouts, written when it is drawn
    rollouts  its rollouts, written when one has content, and whenever that changes
    cursors   how far each task's sampler is, written with the draw
    waste     tokens dropped by groups that live on, per event
    restores  from which checkpoint the run was restarted, and when
    meta      run id, time of creation

Counts are not stored: they are derived from these rows. Every row ends in a CRC-32 of its columns, because SQLite has
no checksums of its own and a flipped bit in a number would be read as another number.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from penstock.errors import LedgerError
from penstock.replay.codec import checksum
from penstock.replay.disk import Connection

FORMAT = 1
APPLICATION_ID = int.from_bytes(b"PNST")

TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    """CREATE TABLE groups (
        sequence INTEGER PRIMARY KEY, group_id TEXT NOT NULL UNIQUE, task TEXT NOT NULL, draw INTEGER NOT NULL,
        state TEXT NOT NULL, train_step INTEGER NOT NULL, reason TEXT, tokens INTEGER NOT NULL,
        statuses TEXT NOT NULL, event INTEGER NOT NULL, crc INTEGER NOT NULL) STRICT""",
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, state TEXT NOT NULL, train_step INTEGER NOT NULL,
        time REAL NOT NULL, reason TEXT, tokens INTEGER NOT NULL, oldest INTEGER, newest INTEGER,
        detail TEXT NOT NULL, crc INTEGER NOT NULL) STRICT""",
    "CREATE TABLE draws (sequence INTEGER PRIMARY KEY, content BLOB NOT NULL, crc INTEGER NOT NULL) STRICT",
    """CREATE TABLE rollouts (
        sequence INTEGER PRIMARY KEY, content BLOB NOT NULL, oldest INTEGER, oldest_newest INTEGER,
        crc INTEGER NOT NULL) STRICT""",
    """CREATE TABLE cursors (
        task TEXT PRIMARY KEY, cursor INTEGER NOT NULL, crc INTEGER NOT NULL) STRICT, WITHOUT ROWID""",
    """CREATE TABLE waste (
        event INTEGER NOT NULL, reason TEXT NOT NULL, tokens INTEGER NOT NULL, crc INTEGER NOT NULL,
        PRIMARY KEY (event, reason)) STRICT, WITHOUT ROWID""",
    """CREATE TABLE restores (
        id INTEGER PRIMARY KEY, event INTEGER NOT NULL, checkpoint_step INTEGER NOT NULL, time REAL NOT NULL,
        crc INTEGER NOT NULL) STRICT""",
)

DAMAGE = (sqlite3.DatabaseError, ValueError, KeyError)
"""What reading a damaged file raises: SQLite's own words, or text and state names that are none any more."""

MIGRATIONS: dict[int, Callable[[Connection], None]] = {}
"""From each older format that can still be read, the step to the next one."""


def is_new(connection: Connection) -> bool:
    """Whether nothing was ever written: a file just made, or one whose making was killed."""
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    return not tables and not _pragma(connection, "application_id")


def create(connection: Connection, *, run_id: str, created: str) -> None:
    """All tables in one transaction: a ledger exists as a whole or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in TABLES:
        connection.execute(statement)
    facts = {"run_id": run_id, "created": created}
    connection.executemany(
        "INSERT INTO meta VALUES (?, ?, ?)", [(key, value, checksum(key, value)) for key, value in facts.items()]
    )
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    connection.execute("COMMIT")


def check_format(connection: Connection, path: Path) -> int:
    """The ledger's format, which this version can read or migrate. Raises LedgerError for any other."""
    application, found = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    if application != APPLICATION_ID:
        raise LedgerError(f"{path} is not a ledger of Penstock (application id {application:#x}); it is left alone")
    if found > FORMAT:
        raise LedgerError(
            f"{path} has format {found}, this version of Penstock reads up to {FORMAT}; resume with a newer Penstock"
        )
    if found < FORMAT and found not in MIGRATIONS:
        raise LedgerError(
            f"{path} has format {found}, which cannot be migrated to {FORMAT}; resume with the Penstock that wrote it"
        )
    return found


def migrate(connection: Connection, path: Path) -> None:
    """Bring an older ledger to this format, each step one transaction."""
    found = check_format(connection, path)
    while found < FORMAT:
        connection.execute("BEGIN IMMEDIATE")
        MIGRATIONS[found](connection)
        found += 1
        connection.execute(f"PRAGMA user_version = {found}")
        connection.execute("COMMIT")
        found = check_format(connection, path)


def check_structure(connection: Connection, path: Path) -> None:
    """Raises LedgerError with what SQLite found wrong. The rows' checksums are looked at where the rows are read."""
    try:
        problems = [row[0] for row in connection.execute("PRAGMA quick_check(10)")]
    except DAMAGE as error:
        problems = [str(error)]
    if problems != ["ok"]:
        raise damaged(path, "; ".join(problem.replace("\n", " ") for problem in problems))


def damaged(path: Path, what: str) -> LedgerError:
    return LedgerError(
        f"{path} is damaged: {what}. Nothing was changed; restore the file from a copy, or start a new run directory"
    )


def _pragma(connection: Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)
