"""The tables of the ledger, its format version, and the checks on opening.

    groups    one row per drawn group: identity, and its state now
    events    every transition with its time; stays when contents are dropped
    draws     a group's prompt and the ids of its rollouts, written when it is drawn
    rollouts  its rollouts, written when one has content, and whenever that changes
    turns     finished turns of the rollouts that are being played; they go when their group stops being RUNNING
    cursors   how far each task's sampler is, written with the draw
    waste     tokens dropped by groups that live on, per event
    restores  from which checkpoint the run was restarted, and when
    past      sums of the groups whose content was dropped, and past_waste of the waste until then (see `history`)
    meta      run id, time of creation

Counts of what is live are not stored: they are derived from these rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import LedgerError
from penstock.replay.disk import Connection
from penstock.replay.table import DAMAGE, Index, Row, Table, Update, damaged

FORMAT = 2
OLDEST_FORMAT = 1
"""What `migrations` can begin with."""
APPLICATION_ID = int.from_bytes(b"PNST")


class MetaRow(Row, frozen=True, gc=False):
    key: str
    value: str


class GroupRow(Row, frozen=True, gc=False):
    sequence: int
    group_id: str
    task: str
    draw: int
    state: str
    train_step: int
    reason: str | None
    tokens: int
    statuses: str
    event: int
    """The last one of the group."""


class EventRow(Row, frozen=True, gc=False):
    id: int
    sequence: int
    """Whose it is."""
    previous: int | None
    """The event of the same group before it. Following these, a group's story costs as much as it is long, without an
    index that every transition would pay for."""
    state: str
    train_step: int
    time: float
    reason: str | None
    tokens: int
    oldest: int | None
    newest: int | None
    detail: str


class DrawRow(Row, frozen=True, gc=False):
    sequence: int
    content: bytes


class RolloutsRow(Row, frozen=True, gc=False):
    sequence: int
    content: bytes
    oldest: int | None
    oldest_newest: int | None


class TurnRow(Row, frozen=True, gc=False):
    id: int
    """In the order in which turns finished."""
    sequence: int
    rollout_id: str
    place: int
    """In the rollout's turns. A row with a place that is already there stands for it and all that came after it."""
    content: bytes


class CursorRow(Row, frozen=True, gc=False):
    task: str
    cursor: int


class WasteRow(Row, frozen=True, gc=False):
    event: int
    reason: str
    tokens: int


class PastRow(Row, frozen=True, gc=False):
    task: str
    outcome: str
    """`trained`, or the reason of the discard."""
    groups: int
    tokens: int
    last_step: int
    """The highest train step among them."""


class PastWasteRow(Row, frozen=True, gc=False):
    reason: str
    tokens: int
    event: int
    """Up to which one it is the sum; the same in all rows."""


class RestoreRow(Row, frozen=True, gc=False):
    id: int
    event: int
    """The last one before the restart."""
    checkpoint_step: int
    time: float


LIVE = "state NOT IN ('trained', 'discarded')"

META = Table("meta", MetaRow, key=["key"])
GROUPS = Table(
    "groups",
    GroupRow,
    key=["sequence"],
    unique=["group_id"],
    # Each holds only the groups it is asked for, so a transition pays for one at most; `search` is who asks.
    indexes={
        "groups_live": Index(("task", "state"), LIVE),
        "groups_trained": Index(("task", "train_step"), "state = 'trained'"),
        "groups_discarded": Index(("task", "reason"), "state = 'discarded'"),
    },
)
EVENTS = Table("events", EventRow, key=["id"])
DRAWS = Table("draws", DrawRow, key=["sequence"])
ROLLOUTS = Table("rollouts", RolloutsRow, key=["sequence"])
TURNS = Table("turns", TurnRow, key=["id"], indexes={"turns_of_group": Index(("sequence",))})
CURSORS = Table("cursors", CursorRow, key=["task"])
WASTE = Table("waste", WasteRow, key=["event", "reason"])
RESTORES = Table("restores", RestoreRow, key=["id"])
PAST = Table("past", PastRow, key=["task", "outcome"])
PAST_WASTE = Table("past_waste", PastWasteRow, key=["reason"])

TABLES: tuple[Table[Any], ...] = (
    META,
    GROUPS,
    EVENTS,
    DRAWS,
    ROLLOUTS,
    TURNS,
    CURSORS,
    WASTE,
    RESTORES,
    PAST,
    PAST_WASTE,
)

MOVE = Update(GROUPS, "sequence", "state", ["state", "train_step", "reason", "tokens", "statuses", "event"])
"""A group's row after a transition, if it is in the state that the transition leaves."""


def is_new(connection: Connection) -> bool:
    """Whether nothing was ever written: a file just made, or one whose making was killed."""
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    return not tables and not _pragma(connection, "application_id")


def create(connection: Connection, *, run_id: str, created: str) -> None:
    """All tables in one transaction: a ledger exists as a whole or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    for table in TABLES:
        table.make(connection)
    facts = [MetaRow("run_id", run_id), MetaRow("created", created)]
    connection.executemany(META.insert, [META.seal(fact) for fact in facts])
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    connection.execute("COMMIT")


def check_format(connection: Connection, path: Path, *, oldest: int = OLDEST_FORMAT) -> int:
    """The ledger's format, from `oldest` to this one. Raises LedgerError for any other."""
    application, found = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    if application != APPLICATION_ID:
        raise LedgerError(f"{path} is not a ledger of Penstock (application id {application:#x}); it is left alone")
    if found > FORMAT:
        raise LedgerError(
            f"{path} has format {found}, this version of Penstock reads up to {FORMAT}; resume with a newer Penstock"
        )
    if found < OLDEST_FORMAT:
        raise LedgerError(
            f"{path} has format {found}, which cannot be migrated to {FORMAT}; resume with the Penstock that wrote it"
        )
    if found < oldest:
        raise LedgerError(
            f"{path} has format {found}, to be read it must have {FORMAT}; resuming the run migrates it, "
            "or read it with the Penstock that wrote it"
        )
    return found


def check_structure(connection: Connection, path: Path) -> None:
    """Raises LedgerError with what SQLite found wrong. The rows' checksums are looked at where the rows are read."""
    try:
        problems = [row[0] for row in connection.execute("PRAGMA quick_check(10)")]
    except DAMAGE as error:
        problems = [str(error)]
    if problems != ["ok"]:
        raise damaged(path, "; ".join(problem.replace("\n", " ") for problem in problems))


def _pragma(connection: Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)
