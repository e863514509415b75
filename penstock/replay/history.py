"""What is over, in sums: groups whose content was dropped, and tokens that were dropped before.

A group without content (`draws` has it no more) was trained for good or discarded: no restart gives it back, and its
row never changes again. So a restart reads the sums and the groups that have content, and costs what is live, however
much was trained.

The sums are written in the transaction that drops the contents, and checked by counting: the groups in the sums and
those with content are all that were drawn. Where that is not so, another version of Penstock wrote the ledger, or it is
damaged: then all rows are read, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.replay.disk import Connection
from penstock.replay.lifecycle import GroupState
from penstock.replay.schema import GROUPS, PAST, PAST_WASTE, WASTE, GroupRow, PastRow, PastWasteRow, WasteRow
from penstock.replay.table import damaged

Key = tuple[str, str]
"""Task and outcome."""


def bring_up(connection: Connection, path: Path) -> None:
    """Make the sums of a ledger that has none, or others than it should. Raises LedgerError when it is damaged."""
    missing = [table for table in (PAST, PAST_WASTE) if not table.exists(connection)]
    if not missing and _adds_up(connection, path):
        return
    connection.execute("BEGIN IMMEDIATE")
    for table in missing:
        table.make(connection)
    _write(connection, _recounted(connection, path))
    connection.execute("COMMIT")


def fold(connection: Connection, path: Path, groups: Iterable[GroupRow], position: int) -> None:
    """Add groups whose content goes, and what was wasted up to the event `position`, in the caller's transaction."""
    _write(connection, _added({(row.task, row.outcome): row for row in PAST.read(connection, path)}, groups))
    wasted = {row.reason: row.tokens for row in PAST_WASTE.read(connection, path)}
    for waste in new_waste(connection, path):
        wasted[waste.reason] = wasted.get(waste.reason, 0) + waste.tokens
    rows = [PAST_WASTE.seal(PastWasteRow(reason, tokens, position)) for reason, tokens in wasted.items()]
    connection.executemany(PAST_WASTE.replace, rows)


def new_waste(connection: Connection, path: Path) -> Iterable[WasteRow]:
    """What the sums do not have."""
    counted = max([row.event for row in PAST_WASTE.read(connection, path)], default=0)
    return WASTE.read(connection, path, "WHERE event > ?", (counted,))


def drawn_groups(connection: Connection) -> int:
    (drawn,) = connection.execute("SELECT coalesce(max(sequence) + 1, 0) FROM groups").fetchone()
    return int(drawn)


def _adds_up(connection: Connection, path: Path) -> bool:
    with_content, there = connection.execute(
        "SELECT count(*), count(groups.sequence) FROM draws LEFT JOIN groups USING (sequence)"
    ).fetchone()
    over = sum(row.groups for row in PAST.read(connection, path))
    return bool(with_content == there and over + there == drawn_groups(connection))


def _recounted(connection: Connection, path: Path) -> dict[Key, PastRow]:
    with_content = {sequence for (sequence,) in connection.execute("SELECT sequence FROM draws")}
    over: list[GroupRow] = []
    sums: dict[Key, PastRow] = {}
    for number, group in enumerate(GROUPS.read(connection, path)):
        if group.sequence != number:
            raise damaged(path, f"group {number} of the order of draws is missing")
        if group.sequence in with_content:
            with_content.discard(group.sequence)
            continue
        if group.state not in (GroupState.TRAINED, GroupState.DISCARDED):
            raise damaged(path, f"group {group.group_id!r} is {group.state}, but its content is missing")
        over.append(group)
        if len(over) == 4096:
            sums = _added(sums, over)
            over.clear()
    if with_content:
        raise damaged(path, f"groups {sorted(with_content)[:8]} have content, but are missing themselves")
    return _added(sums, over)


def _added(sums: dict[Key, PastRow], groups: Iterable[GroupRow]) -> dict[Key, PastRow]:
    for group in groups:
        outcome = group.reason or group.state
        before = sums.get((group.task, outcome)) or PastRow(group.task, outcome, 0, 0, 0)
        sums[group.task, outcome] = PastRow(
            group.task,
            outcome,
            before.groups + 1,
            before.tokens + group.tokens,
            max(before.last_step, group.train_step),
        )
    return sums


def _write(connection: Connection, sums: dict[Key, PastRow]) -> None:
    connection.executemany(PAST.replace, [PAST.seal(row) for row in sums.values()])
