"""The SQLite ledger: a storage that survives.

One file, `ledger.sqlite`, in the run directory; one process, held by a lock; one writer. A transition, the content it
brings and the sampler's cursor are rows of one transaction. What is recorded is encoded at once, because groups go on
changing; it is durable when `flush` returns. Finished turns of groups that are being played are rows beside them, in
the same order.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from penstock.errors import LedgerError, StorageError
from penstock.ports import FinishedTurn
from penstock.replay import codec, history, schema, wal
from penstock.replay.check import CHECKED_AT_ONCE, Checking, check_rows
from penstock.replay.disk import Connection, Disk, SqliteDisk
from penstock.replay.jobs import PRUNED_AT_ONCE, AppendTurn, Job, Prune, Restart, Write, apply
from penstock.replay.lifecycle import GroupState, Transition
from penstock.replay.lock import RunLock, lock_directory
from penstock.replay.migrations import migrate
from penstock.replay.restore import Snapshot, check_lineage, last_event, read_snapshot
from penstock.replay.schema import (
    DRAWS,
    EVENTS,
    RESTORES,
    ROLLOUTS,
    TURNS,
    WASTE,
    CursorRow,
    DrawRow,
    EventRow,
    GroupRow,
    RestoreRow,
    RolloutsRow,
    TurnRow,
    WasteRow,
)
from penstock.replay.table import DAMAGE, damaged
from penstock.replay.writer import InlineWriter, ThreadWriter, Writer
from penstock.rollout import Group

LEDGER_FILE = "ledger.sqlite"
FINAL = frozenset({GroupState.TRAINED, GroupState.DISCARDED})
STATE_NAMES = {state: state.value for state in GroupState}
"""As plain strings: SQLite looks longer at a member of an enumeration."""


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
        checking: Checking | None = None,
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
        self._last_events: dict[int, int] = {}
        """Of each group that may still move."""
        self._with_turns: set[int] = set()
        """The groups that have rows among the turns."""
        self.checking = checking
        """The check of a large ledger, beside the run."""
        self._turns = 0
        """The id of the last turn."""

    @classmethod
    def open(
        cls,
        run_dir: Path,
        *,
        disk: Disk | None = None,
        threaded: bool = True,
        clock: Callable[[], float] = time.time,
        flush_timeout_s: float = 60.0,
        checked_at_once: int = CHECKED_AT_ONCE,
    ) -> Self:
        """Open the run's ledger, or begin one. With `threaded=False` every record is written at once, by the caller.

        One of more bytes than `checked_at_once` is checked beside the run; damage found there is raised by what is
        recorded or flushed next.

        Raises LedgerError when it is held by another process, damaged, or of a format that cannot be read, and
        StorageError when a new one cannot be written.
        """
        path = run_dir / LEDGER_FILE
        lock = lock_directory(run_dir)
        connection: Connection | None = None
        later = False
        try:
            wal.check(path)
            connection = (disk or SqliteDisk()).connect(path)
            if schema.is_new(connection):
                schema.create(connection, run_id=secrets.token_hex(8), created=_iso(clock()))
                _sync_directory(run_dir)
            else:
                schema.check_format(connection, path)
                later = threaded and path.stat().st_size > checked_at_once
                if not later:
                    schema.check_structure(connection, path)
                migrate(connection, path)
                if not later:
                    check_rows(connection, path)
                history.bring_up(connection, path)
                # A log begun anew: what two torn ends in a row leave behind could look like damage.
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            checking = Checking(path) if later else None
            return cls(
                connection,
                lock,
                path,
                threaded=threaded,
                clock=clock,
                flush_timeout_s=flush_timeout_s,
                checking=checking,
            )
        except BaseException as error:
            if connection is not None:
                connection.close()
            lock.release()
            if isinstance(error, sqlite3.OperationalError | OSError):
                raise StorageError(f"{path} cannot be opened: {error}") from error
            if isinstance(error, DAMAGE):
                raise damaged(path, str(error)) from error
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
        except DAMAGE as error:
            raise damaged(self.path, f"{type(error).__name__}: {error}") from error
        self._loaded = True
        self._last_events = {held.sequence: held.event for held in snapshot.held}
        self._with_turns = {held.sequence for held in snapshot.held if held.turns}
        self._turns = max((turn.id for held in snapshot.held for turn in held.turns), default=0)
        if self._position:
            (number,) = self._connection.execute("SELECT coalesce(max(id), 0) + 1 FROM restores").fetchone()
            # Recorded with the first move that follows from it: a restart that was refused leaves no trace.
            row = RestoreRow(number, self._position, checkpoint_step, self._clock())
            self._restart = Restart(RESTORES.seal(row))
        return snapshot

    def record(self, transition: Transition, group: Group | None = None, cursor: int | None = None) -> None:
        if not self._loaded:
            raise LedgerError(f"{self.path} holds the groups of an earlier process; restore them before drawing more")
        if self.checking is not None:
            self._raise_damage()
        if self._restart is not None:
            self._submit(self._restart)
            self._restart = None
        self._submit(self._encode(transition, group, cursor))
        self._position += 1
        if transition.target in FINAL:
            # No move of this process leaves these.
            del self._last_events[transition.sequence]
        else:
            self._last_events[transition.sequence] = self._position
        if self._with_turns and transition.source is GroupState.RUNNING:
            self._with_turns.discard(transition.sequence)

    def record_turn(self, sequence: int, turn: FinishedTurn) -> None:
        self._turns += 1
        content = codec.encode_turn(turn)
        row = TURNS.seal(TurnRow(self._turns, sequence, turn.rollout_id, turn.index, content))
        self._submit(AppendTurn(sequence, row, len(content)))
        self._with_turns.add(sequence)

    async def flush(self) -> None:
        if self.checking is not None:
            self._raise_damage()
        if self._writer is not None:
            await self._writer.wait(self._ticket)

    async def prune(self, oldest_retained_checkpoint_step: int) -> None:
        """Drop the contents of groups trained up to that step and of discarded ones; their events stay.

        Returns when that is durable. The pages are used again, so the file grows no larger than what is kept at once.
        """
        after = -1
        while True:
            job = Prune(self.path, oldest_retained_checkpoint_step, after)
            self._submit(job)
            await self.flush()
            if len(job.dropped) < PRUNED_AT_ONCE:
                return
            after = job.dropped[-1]

    async def close(self) -> None:
        try:
            if self.checking is not None:
                await self.checking.stop()
            if self._writer is not None:
                await self._writer.close()
            else:
                self._connection.close()
        finally:
            self._lock.release()

    # Inside.

    def _raise_damage(self) -> None:
        if self.checking is not None and self.checking.damage is not None:
            raise self.checking.damage

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
        previous = self._last_events.get(sequence)
        draw = rollouts = drawn_to = oldest = newest = None
        size = 0
        if cursor is not None:
            assert group is not None, "a draw brings its group"
            content = codec.encode_draw(group)
            draw = DRAWS.seal(DrawRow(sequence, content))
            drawn_to = CursorRow(task, cursor)
            size = len(content)
        elif group is not None:
            oldest, newest = transition.made.oldest, transition.made.newest
            content = self._rollouts.encode(group)
            rollouts = ROLLOUTS.seal(RolloutsRow(sequence, content, oldest, transition.made.oldest_newest))
            size = len(content)
        now, detail = self._clock(), transition.detail
        statuses = codec.encode_statuses(transition.statuses)
        moved = EventRow(event, sequence, previous, target, train_step, now, reason, tokens, oldest, newest, detail)
        after = GroupRow(
            sequence, transition.group_id, task, transition.draw, target, train_step, reason, tokens, statuses, event
        )
        return Write(
            sequence,
            EVENTS.seal(moved),
            after,
            STATE_NAMES[transition.source] if transition.source is not None else None,
            draw,
            rollouts,
            drawn_to,
            tuple([WASTE.seal(WasteRow(event, why, n)) for why, n in transition.wasted]) if transition.wasted else (),
            bool(self._with_turns) and sequence in self._with_turns and transition.source is GroupState.RUNNING,
            size,
        )


def has_ledger(run_dir: Path) -> bool:
    """Whether a run was begun in this directory."""
    return (run_dir / LEDGER_FILE).exists()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _sync_directory(directory: Path) -> None:
    """A new file's name is durable only when its directory is."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
