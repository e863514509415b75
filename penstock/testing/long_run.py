"""The ledger of a run that has trained for long, without the training."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.replay import GroupState, Ledger
from penstock.replay.disk import SqliteDisk
from penstock.replay.schema import CURSORS, EVENTS, GROUPS, CursorRow, EventRow, GroupRow

MOVES = (GroupState.RUNNING, GroupState.COMPLETED, GroupState.LEASED, GroupState.TRAINED)
AT_ONCE = 4096


def write_trained(run_dir: Path, groups: int, *, task: str = "sums", per_step: int = 64, tokens: int = 512) -> int:
    """A ledger in which so many groups were trained and their contents dropped; returns the last train step.

    Without the sums of what is over, like one that an earlier version wrote: the first opening makes them.
    """
    ledger = Ledger.open(run_dir)
    asyncio.run(ledger.close())
    connection = SqliteDisk().connect(ledger.path)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN IMMEDIATE")
    for first in range(0, groups, AT_ONCE):
        drawn = range(first, min(first + AT_ONCE, groups))
        steps = {sequence: 1 + sequence // per_step for sequence in drawn}
        connection.executemany(
            GROUPS.insert,
            [
                GROUPS.seal(
                    GroupRow(
                        sequence, f"{task}:{sequence}", task, sequence, MOVES[-1].value, steps[sequence], None, tokens,
                        "cccccccc", len(MOVES) * (sequence + 1),
                    )
                )
                for sequence in drawn
            ],
        )  # fmt: skip
        connection.executemany(EVENTS.insert, [row for sequence in drawn for row in _events(sequence, steps, tokens)])
    connection.execute(CURSORS.insert, CURSORS.seal(CursorRow(task, groups)))
    connection.execute("COMMIT")
    connection.close()
    return 1 + (groups - 1) // per_step


def _events(sequence: int, steps: dict[int, int], tokens: int) -> list[tuple[object, ...]]:
    first = len(MOVES) * sequence + 1
    step = steps[sequence]
    return [
        EVENTS.seal(
            EventRow(
                first + place, sequence, first + place - 1 if place else None, state.value, step, 0.0, None,
                tokens if place else 0, step - 1 if place == 1 else None, step - 1 if place == 1 else None, "",
            )
        )
        for place, state in enumerate(MOVES)
    ]  # fmt: skip
