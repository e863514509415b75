"""Groups of the ledger by task, state, train step and reason, a page at a time. Reads only, and only what it gives.

Every question is asked per task, and for a discarded group per reason: so each has an index in which its answers stand
in order of their drawing, and the pages of all are merged.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.replay.codec import decode_statuses
from penstock.replay.lifecycle import DiscardReason, GroupState
from penstock.replay.schema import CURSORS, GROUPS, LIVE, GroupRow
from penstock.replay.story import ledger_file, open_read_only


class Asked(msgspec.Struct, frozen=True):
    """Which groups are wanted; what is None is not looked at."""

    state: GroupState
    task: str | None = None
    train_step: int | None = None
    """The step of the last move; for LEASED and TRAINED that of the batch."""
    reason: DiscardReason | None = None


def find_groups(path: Path, asked: Asked, *, after: int = -1, limit: int = 100) -> list[dict[str, Any]]:
    """The next groups in order of their drawing; the next page begins `after` the `sequence` of the last one."""
    file = ledger_file(path)
    with open_read_only(path) as connection:
        tasks = [asked.task] if asked.task is not None else [row.task for row in CURSORS.read(connection, file)]
        found = heapq.merge(
            *(
                GROUPS.read(connection, file, where, (*values, after), limit=limit)
                for task in tasks
                for where, values in questions(asked, task)
            ),
            key=lambda group: group.sequence,
        )
        return [_plain(group) for group in itertools.islice(found, limit)]


def questions(asked: Asked, task: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What to ask of the groups of a task, each with its values but the last: the sequence to begin after."""
    step: tuple[Any, ...] = () if asked.train_step is None else (asked.train_step,)
    of_step = " AND train_step = ?" if step else ""
    if asked.state is GroupState.DISCARDED:
        for reason in DiscardReason if asked.reason is None else [asked.reason]:
            where = f"WHERE task = ? AND reason = ?{of_step} AND state = 'discarded' AND sequence > ?"
            yield where, (task, reason.value, *step)
    elif asked.state is not GroupState.TRAINED:
        yield f"WHERE task = ? AND state = ?{of_step} AND {LIVE} AND sequence > ?", (task, asked.state.value, *step)
    elif step:
        yield "WHERE task = ? AND train_step = ? AND state = 'trained' AND sequence > ?", (task, *step)
    else:
        # Most groups are trained: the order of drawing finds the next ones soonest.
        yield "NOT INDEXED WHERE task = ? AND state = 'trained' AND sequence > ?", (task,)


def _plain(group: GroupRow) -> dict[str, Any]:
    statuses = [status.value for status in decode_statuses(group.statuses)]
    return {**msgspec.structs.asdict(group), "statuses": statuses}
