"""The SQLite ledger: a storage that survives.

One file, `ledger.sqlite`, in the run directory; one process, held by a lock; one writer. A transition, the content it
brings and the sampler's cursor are rows of one transaction. What is recorded is encoded at once, because groups go on
changing; it is durable when `flush` returns.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec

from penstock.errors import LedgerError, StorageError
from penstock.replay import codec, schema, wal
from penstock.replay.disk import Connection, Disk, SqliteDisk
from penstock.replay.lifecycle import GroupState, Transition
from penstock.replay.lock import RunLock
from penstock.replay.restore import Snapshot, check_lineage, last_event, read_snapshot
from penstock.replay.writer import InlineWriter, ThreadWriter, Writer
from penstock.rollout import Group

LEDGER_FILE = "ledger.sqlite"
LOCK_FILE = "ledger.lock"
PRUNED_AT_ONCE = 256
"""Groups whose content is dropped in one transaction; bounds how long that makes a finished group wait."""

STATE_NAMES = {state: state.value for state in GroupState}
"""As plain strings: SQLite looks longer at a member of an enumeration."""

Row = tuple[Any, ...]


class Write(msgspec.Struct, frozen=True, gc=False):
    """One transition as rows."""

    event: Row
    group: Row
    source: str | None
    draw: Row | None = None
    rollouts: Row | None = None
    cursor: tuple[str, int] | None = None
    """Without its checksum: only the last one of a transaction is written."""
    waste: tuple[Row, ...] = ()
    size: int = 0


class Restart(msgspec.Struct, frozen=True, gc=False):
    """The run was restarted from a checkpoint."""

    row: Row
    size: int = 0


class Prune(msgspec.Struct):
    """Drop the contents of the next groups that need none any more, in order of their drawing."""

    checkpoint_step: int
    after: int
    dropped: list[int] = []
    """Filled in when it is written."""
    size: int = 0


Job = Write | Restart | Prune


class Ledger:
    """A `Storage`. Open it with `Ledger.open`; an existing one is read by `load` before anything is recorded."""

    def __init__(
        self,
        connection: Connection,
        lock: RunLock,
        path: Path,
        *,
        threaded: bool,
        clock: Callable[[], float],
        flush_timeout_s: float,
    ) -> None:
        self.path = path
        self._connection = connection
        self._lock = lock
        self._threaded = threaded
        self._clock = clock
        self._flush_timeout_s = flush_timeout_s
        self._writer: Writer[Job] | None = None
        self._ticket = 0
        self._position = last_event(connection)
        self._loaded = self._position == 0
        self._restart: Restart | None = None
        self._rollouts = codec.RolloutsEncoder()

    @classmethod
    def open(
        cls,
        run_dir: Path,
        *,
        disk: Disk | None = None,
        threaded: bool = True,
        clock: Callable[[], float] = time.time,
        flush_timeout_s: float = 60.0,
    ) -> Self:
        """Open the run's ledger, or begin one. With `threaded=False` every record is written at once, by the caller.

        Raises LedgerError when it is held by another process, damaged, or of a format that cannot be read, and
        StorageError when a new one cannot be written.
        """
        path = run_dir / LEDGER_FILE
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = RunLock(run_dir / LOCK_FILE)
        except OSError as error:
            raise StorageError(f"{run_dir} cannot be written: {error}") from error
        connection: Connection | None = None
        try:
            wal.check(path)
            connection = (disk or SqliteDisk()).connect(path)
            if schema.is_new(connection):
                schema.create(connection, run_id=secrets.token_hex(8), created=_iso(clock()))
                _sync_directory(run_dir)
            else:
                schema.migrate(connection, path)
                schema.check_structure(connection, path)
                # A log begun anew: what two torn ends in a row leave behind could look like damage.
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return cls(connection, lock, path, threaded=threaded, clock=clock, flush_timeout_s=flush_timeout_s)
        except BaseException as error:
            if connection is not None:
                connection.close()
            lock.release()
            if isinstance(error, sqlite3.OperationalError | OSError):
                raise StorageError(f"{path} cannot be opened: {error}") from error
            if isinstance(error, schema.DAMAGE):
                raise schema.damaged(path, str(error)) from error
            raise

    @property
    def position(self) -> int:
        """The id of the last event recorded; a checkpoint keeps it, see `load`."""
        return self._position

    def load(self, checkpoint_step: int, position: int | None = None) -> Snapshot:
        """Everything a restart from `checkpoint_step` begins with. Once, before anything is recorded.

        With `position`, the one that was current when the checkpoint was written: LedgerError when the ledger ends
        before it, or when the run was since restarted from an older checkpoint.
        """
        if self._writer is not None:
            raise RuntimeError("a ledger is loaded before anything is recorded")
        try:
            if position is not None:
                check_lineage(self._connection, checkpoint_step, position, self.path)
            snapshot = read_snapshot(self._connection, checkpoint_step, self.path)
        except schema.DAMAGE as error:
            raise schema.damaged(self.path, f"{type(error).__name__}: {error}") from error
        self._loaded = True
        if self._position:
            (number,) = self._connection.execute("SELECT coalesce(max(id), 0) + 1 FROM restores").fetchone()
            # Recorded with the first move that follows from it: a restart that was refused leaves no trace.
            self._restart = Restart(codec.seal((number, self._position, checkpoint_step, self._clock())))
        return snapshot

    def record(self, transition: Transition, group: Group | None = None, cursor: int | None = None) -> None:
        if not self._loaded:
            raise LedgerError(f"{self.path} holds the groups of an earlier process; restore them before drawing more")
        if self._restart is not None:
            self._submit(self._restart)
            self._restart = None
        self._submit(self._encode(transition, group, cursor))
        self._position += 1

    async def flush(self) -> None:
        if self._writer is not None:
            await self._writer.wait(self._ticket)

    async def prune(self, oldest_retained_checkpoint_step: int) -> None:
        """Drop the contents of groups trained up to that step and of discarded ones; their events stay.

        Returns when that is durable. The pages are used again, so the file grows no larger than what is kept at once.
        """
        after = -1
        while True:
            job = Prune(oldest_retained_checkpoint_step, after)
            self._submit(job)
            await self.flush()
            if len(job.dropped) < PRUNED_AT_ONCE:
                return
            after = job.dropped[-1]

    async def close(self) -> None:
        try:
            if self._writer is not None:
                await self._writer.close()
            else:
                self._connection.close()
        finally:
            self._lock.release()

    # Inside.

    def _submit(self, job: Job) -> None:
        if self._writer is None:
            if self._threaded:
                self._writer = ThreadWriter(self._connection, apply, self.path, wait_timeout_s=self._flush_timeout_s)
            else:
                self._writer = InlineWriter(self._connection, apply, self.path)
        self._ticket = self._writer.submit(job)

    def _encode(self, transition: Transition, group: Group | None, cursor: int | None) -> Write:
        sequence, task, train_step = transition.sequence, transition.task, transition.train_step
        event, tokens, target = self._position + 1, transition.tokens, STATE_NAMES[transition.target]
        reason = transition.reason.value if transition.reason is not None else None
        draw = rollouts = drawn_to = oldest = newest = None
        size = 0
        if cursor is not None:
            assert group is not None, "a draw brings its group"
            content = codec.encode_draw(group)
            draw = (sequence, content, codec.content_checksum(content, sequence))
            drawn_to = (task, cursor)
            size = len(content)
        elif group is not None:
            oldest, oldest_newest, newest = codec.model_steps(group)
            content = self._rollouts.encode(group)
            crc = codec.content_checksum(content, sequence, oldest, oldest_newest)
            rollouts = (sequence, content, oldest, oldest_newest, crc)
            size = len(content)
        statuses = codec.encode_statuses(transition.statuses)
        return Write(
            codec.seal(
                (event, sequence, target, train_step, self._clock(), reason, tokens, oldest, newest, transition.detail)
            ),
            codec.seal(
                (
                    *(sequence, transition.group_id, task, transition.draw),
                    *(target, train_step, reason, tokens, statuses, event),
                )
            ),
            STATE_NAMES[transition.source] if transition.source is not None else None,
            draw,
            rollouts,
            drawn_to,
            tuple([codec.seal((event, why, n)) for why, n in transition.wasted]) if transition.wasted else (),
            size,
        )


def has_ledger(run_dir: Path) -> bool:
    """Whether a run was begun in this directory."""
    return (run_dir / LEDGER_FILE).exists()


def apply(connection: Connection, jobs: Sequence[Job]) -> None:
    """Write the rows of these jobs; the caller's transaction makes them one."""
    writes = [job for job in jobs if isinstance(job, Write)]
    if writes:
        _apply_writes(connection, writes)
    for job in jobs:
        if isinstance(job, Restart):
            connection.execute("INSERT INTO restores VALUES (?, ?, ?, ?, ?)", job.row)
        elif isinstance(job, Prune):
            _apply_prune(connection, job)


def _apply_writes(connection: Connection, writes: Sequence[Write]) -> None:
    """Table by table, which is several times faster than row by row; of what changes in place, the last of each."""
    groups: dict[int, Write] = {}
    sources: dict[int, str | None] = {}
    for write in writes:
        sequence = write.group[0]
        groups[sequence] = write
        sources.setdefault(sequence, write.source)
    for sql, rows in (
        ("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [write.event for write in writes]),
        (
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [groups[sequence].group for sequence, source in sources.items() if source is None],
        ),
        ("INSERT INTO draws VALUES (?, ?, ?)", [write.draw for write in writes if write.draw]),
        (
            "INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?)",
            list({write.rollouts[0]: write.rollouts for write in writes if write.rollouts}.values()),
        ),
        (
            "INSERT OR REPLACE INTO cursors VALUES (?, ?, ?)",
            [codec.seal(cursor) for cursor in dict([write.cursor for write in writes if write.cursor]).items()],
        ),
        ("INSERT INTO waste VALUES (?, ?, ?, ?)", [row for write in writes for row in write.waste]),
    ):
        if rows:
            connection.executemany(sql, rows)
    moved = [
        (sequence, source, *groups[sequence].group[4:]) for sequence, source in sources.items() if source is not None
    ]
    if moved:
        before = connection.total_changes
        connection.executemany(
            """UPDATE groups SET state = column3, train_step = column4, reason = column5, tokens = column6,
                                 statuses = column7, event = column8, crc = column9
               FROM (VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)) WHERE sequence = column1 AND state = column2""",
            moved,
        )
        if connection.total_changes - before != len(moved):
            raise RuntimeError("a group in the ledger is not in the state that the buffer has it in")


def _apply_prune(connection: Connection, job: Prune) -> None:
    # The draws say which groups have content: their rows are small, those of the rollouts are not.
    rows = connection.execute(
        """SELECT sequence FROM draws JOIN groups USING (sequence)
           WHERE sequence > ? AND (state = 'discarded' OR (state = 'trained' AND train_step <= ?))
           ORDER BY sequence LIMIT ?""",
        (job.after, job.checkpoint_step, PRUNED_AT_ONCE),
    ).fetchall()
    connection.executemany("DELETE FROM draws WHERE sequence IN (VALUES (?))", rows)
    connection.executemany("DELETE FROM rollouts WHERE sequence IN (VALUES (?))", rows)
    job.dropped = [sequence for (sequence,) in rows]


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _sync_directory(directory: Path) -> None:
    """A new file's name is durable only when its directory is."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
