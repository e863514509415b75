"""What the ledger's writer is given: transitions and turns as rows, restarts, prunings; and how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.replay import history
from penstock.replay.disk import Connection
from penstock.replay.restore import last_event
from penstock.replay.schema import (
    CURSORS,
    DRAWS,
    EVENTS,
    GROUPS,
    MOVE,
    RESTORES,
    ROLLOUTS,
    TURNS,
    WASTE,
    CursorRow,
    GroupRow,
)
from penstock.replay.table import Sealed

PRUNED_AT_ONCE = 256
"""Groups whose content is dropped in one transaction; bounds how long that makes a finished group wait."""


class Write(msgspec.Struct, frozen=True, gc=False):
    """One transition as rows."""

    sequence: int
    event: Sealed
    group: GroupRow
    """Without its checksum, like the cursor: only the last one of a transaction is written."""
    source: str | None
    draw: Sealed | None = None
    rollouts: Sealed | None = None
    cursor: CursorRow | None = None
    waste: tuple[Sealed, ...] = ()
    ends_turns: bool = False
    """The group has turns and is no longer played: what it keeps is in its rollouts."""
    size: int = 0


class AppendTurn(msgspec.Struct, frozen=True, gc=False):
    """A turn of a group that is being played."""

    sequence: int
    turn: Sealed
    size: int = 0


class Restart(msgspec.Struct, frozen=True, gc=False):
    """The run was restarted from a checkpoint."""

    row: Sealed
    size: int = 0


class Prune(msgspec.Struct):
    """Drop the contents of the next groups that need none any more, in order of their drawing."""

    path: Path
    """Of the ledger, for messages."""
    checkpoint_step: int
    after: int
    dropped: list[int] = []
    """Filled in when it is written."""
    size: int = 0


Job = Write | AppendTurn | Restart | Prune


def apply(connection: Connection, jobs: Sequence[Job]) -> None:
    """Write the rows of these jobs; the caller's transaction makes them one."""
    writes: list[Write] = []
    turns: dict[int, list[Sealed]] = {}
    ended: dict[int, None] = {}
    others: list[Restart | Prune] = []
    for job in jobs:
        if isinstance(job, Write):
            writes.append(job)
            if job.ends_turns:  # those before it; the group may have begun again since
                ended[job.sequence] = None
                turns.pop(job.sequence, None)
        elif isinstance(job, AppendTurn):
            turns.setdefault(job.sequence, []).append(job.turn)
        else:
            others.append(job)
    if writes:
        _apply_writes(connection, writes)
    if ended:
        connection.executemany(TURNS.delete("sequence"), [(sequence,) for sequence in ended])
    if turns:
        connection.executemany(TURNS.insert, [turn for of_group in turns.values() for turn in of_group])
    for other in others:
        if isinstance(other, Restart):
            connection.execute(RESTORES.insert, other.row)
        else:
            _apply_prune(connection, other)


def _apply_writes(connection: Connection, writes: Sequence[Write]) -> None:
    """Table by table, which is several times faster than row by row; of what changes in place, the last of each."""
    groups: dict[int, GroupRow] = {}
    sources: dict[int, str | None] = {}
    for write in writes:
        groups[write.sequence] = write.group
        sources.setdefault(write.sequence, write.source)
    contents = {write.sequence: write.rollouts for write in writes if write.rollouts}
    cursors = {write.cursor.task: write.cursor for write in writes if write.cursor}
    for sql, rows in (
        (EVENTS.insert, [write.event for write in writes]),
        (GROUPS.insert, [GROUPS.seal(groups[sequence]) for sequence, source in sources.items() if source is None]),
        (DRAWS.insert, [write.draw for write in writes if write.draw]),
        (ROLLOUTS.replace, list(contents.values())),
        (CURSORS.replace, [CURSORS.seal(cursor) for cursor in cursors.values()]),
        (WASTE.insert, [row for write in writes for row in write.waste]),
    ):
        if rows:
            connection.executemany(sql, rows)
    moved = [
        MOVE.parameters(GROUPS.seal(groups[sequence]), source)
        for sequence, source in sources.items()
        if source is not None
    ]
    if moved:
        before = connection.total_changes
        connection.executemany(MOVE.sql, moved)
        if connection.total_changes - before != len(moved):
            raise RuntimeError("a group in the ledger is not in the state that the buffer has it in")


def _apply_prune(connection: Connection, job: Prune) -> None:
    # The draws say which groups have content: their rows are small, those of the rollouts are not.
    rows = connection.execute(
        """SELECT draws.sequence FROM draws CROSS JOIN groups USING (sequence)
           WHERE draws.sequence > ? AND (state = 'discarded' OR (state = 'trained' AND train_step <= ?))
           ORDER BY draws.sequence LIMIT ?""",
        (job.after, job.checkpoint_step, PRUNED_AT_ONCE),
    ).fetchall()
    job.dropped = [sequence for (sequence,) in rows]
    if not rows:
        return
    among = f"WHERE groups.sequence IN ({', '.join('?' * len(rows))})"
    over = GROUPS.read(connection, job.path, among, job.dropped)
    history.fold(connection, job.path, over, last_event(connection))
    connection.executemany(DRAWS.delete("sequence"), rows)
    connection.executemany(ROLLOUTS.delete("sequence"), rows)
