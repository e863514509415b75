"""Older ledgers brought to this format. Each step is one transaction: a kill in the middle leaves the ledger as it was.

1 -> 2    an event knows the one before it; turns of groups that are being played; indexes for those who look
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.replay.codec import StoredRollout, rollouts_decoder
from penstock.replay.disk import Connection
from penstock.replay.schema import EVENTS, FORMAT, GROUPS, ROLLOUTS, TURNS, EventRow, check_format
from penstock.replay.table import Row, Table
from penstock.rollout import FailureReason

AT_ONCE = 1024
"""Rows in memory at a time."""

T = TypeVar("T")


class EventRow1(Row, frozen=True, gc=False):
    id: int
    sequence: int
    state: str
    train_step: int
    time: float
    reason: str | None
    tokens: int
    oldest: int | None
    newest: int | None
    detail: str


def migrate(connection: Connection, path: Path) -> None:
    """Bring an older ledger to this format. Raises LedgerError, nothing changed, when it is damaged."""
    found = check_format(connection, path)
    while found < FORMAT:
        connection.execute("BEGIN IMMEDIATE")
        STEPS[found](connection, path)
        found += 1
        connection.execute(f"PRAGMA user_version = {found}")
        connection.execute("COMMIT")


def _from_1_to_2(connection: Connection, path: Path) -> None:
    connection.execute("ALTER TABLE events RENAME TO events_1")
    EVENTS.make(connection)
    last: dict[int, int] = {}
    for old in _batches(Table("events_1", EventRow1, key=["id"]).read(connection, path)):
        rows = []
        for event in old:
            rows.append(EVENTS.seal(EventRow(previous=last.get(event.sequence), **msgspec.structs.asdict(event))))
            last[event.sequence] = event.id
        connection.executemany(EVENTS.insert, rows)
    connection.execute("DROP TABLE events_1")
    GROUPS.make_indexes(connection)
    TURNS.make(connection)
    played = ROLLOUTS.read(connection, path)
    renamed = [
        msgspec.structs.replace(row, content=content) for row in played if (content := _known_reasons(row.content))
    ]
    connection.executemany(ROLLOUTS.replace, [ROLLOUTS.seal(row) for row in renamed])


def _known_reasons(content: bytes) -> bytes | None:
    """The rollouts with reasons that have a name, or None when they all have: loops of users had words of their own."""
    try:
        rollouts_decoder.decode(content)
        return None
    except msgspec.ValidationError:
        rollouts = msgspec.msgpack.decode(content)
    error = StoredRollout.__struct_fields__.index("error")
    for rollout in rollouts:
        failure = rollout[error]
        if failure is not None and not _is_known(failure["reason"]):
            failure["message"] = f"{failure['reason']}: {failure['message']}"
            failure["reason"] = FailureReason.AGENT_LOOP_ERROR
    return msgspec.msgpack.encode(rollouts)


def _is_known(reason: str) -> bool:
    try:
        FailureReason(reason)
    except ValueError:
        return False
    return True


def _batches(rows: Iterable[T]) -> Iterator[list[T]]:
    remaining = iter(rows)
    while batch := list(itertools.islice(remaining, AT_ONCE)):
        yield batch


STEPS: dict[int, Callable[[Connection, Path], None]] = {1: _from_1_to_2}
"""From each older format, the step to the next one."""
