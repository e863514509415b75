"""What a restart begins with, read from the ledger.

Only rows are read here; what becomes of each group is decided by `ReplayBuffer.restore`, as moves like any other, so
that a crash in the middle of a restart is one more crash and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import LedgerError
from penstock.replay.codec import StoredGroup, checksum, content_checksum, decode_statuses, encode_statuses
from penstock.replay.disk import Connection
from penstock.replay.lifecycle import DiscardReason, GroupState
from penstock.replay.schema import damaged
from penstock.rollout import Status

UNPLAYED = encode_statuses((Status.INIT, Status.ABORTED))
"""Statuses that a rollout can have without ever having had content."""


class HeldGroup(msgspec.Struct, frozen=True):
    """A group that may still be trained in the restored lineage."""

    sequence: int
    state: GroupState
    train_step: int
    tokens: int
    statuses: tuple[Status, ...]
    oldest: int | None
    oldest_newest: int | None
    content: StoredGroup


class Snapshot(msgspec.Struct):
    """The ledger as of its last durable transaction, seen from a checkpoint."""

    position: int = 0
    """The id of the last event."""
    next_sequence: int = 0
    held: list[HeldGroup] = []
    states: dict[str, Counter[GroupState]] = {}
    discarded: dict[str, Counter[DiscardReason]] = {}
    trained: dict[str, int] = {}
    """Groups per task that were trained up to the checkpoint."""
    trained_tokens: int = 0
    wasted: Counter[str] = msgspec.field(default_factory=Counter)
    cursors: dict[str, int] = {}


class Restored(msgspec.Struct, frozen=True):
    """What the other parts of a run need to go on."""

    cursors: dict[str, int]
    """Groups drawn per task: where its sampler goes on."""
    trained: dict[str, int]
    """Groups trained up to the checkpoint, per task: `consumed_samples`."""
    returned: dict[GroupState, int]
    """Groups that came back, by the state in which the restart found them."""


def read_snapshot(connection: Connection, checkpoint_step: int, path: Path) -> Snapshot:
    """Raises LedgerError when a row does not have its checksum or a content that is needed is not there."""
    snapshot = Snapshot()
    events = 0
    for row in checked_rows(connection, "groups", path):
        sequence, _, task, _, state, train_step, reason, tokens, _, event = row
        if sequence != snapshot.next_sequence:
            raise damaged(path, f"group {snapshot.next_sequence} of the order of draws is missing")
        snapshot.next_sequence += 1
        events = max(events, event)
        snapshot.states.setdefault(task, Counter())[GroupState(state)] += 1
        snapshot.trained.setdefault(task, 0)
        if state == GroupState.DISCARDED:
            snapshot.discarded.setdefault(task, Counter())[DiscardReason(reason)] += 1
            snapshot.wasted[reason] += tokens
        elif state == GroupState.TRAINED and train_step <= checkpoint_step:
            snapshot.trained[task] += 1
            snapshot.trained_tokens += tokens
    snapshot.position = last_event(connection)
    if snapshot.position != events:
        raise damaged(path, f"the last event is {snapshot.position}, but the groups know of {events}")
    (drawn,) = connection.execute("SELECT coalesce(max(sequence) + 1, 0) FROM events").fetchone()
    if drawn != snapshot.next_sequence:
        raise damaged(path, f"{drawn} groups were drawn, {snapshot.next_sequence} are there")
    for _, reason, tokens in checked_rows(connection, "waste", path):
        snapshot.wasted[reason] += tokens
    snapshot.cursors = dict(checked_rows(connection, "cursors", path))
    snapshot.held = list(_held(connection, checkpoint_step, path))
    return snapshot


def check_lineage(connection: Connection, checkpoint_step: int, position: int, path: Path) -> None:
    """Whether a checkpoint that was written at `position` belongs to the lineage that the ledger is in."""
    last = last_event(connection)
    if position > last:
        raise damaged(
            path,
            f"it ends at event {last}, but checkpoint {checkpoint_step} was written after event {position}; "
            "acknowledged transactions are missing",
        )
    for _, event, earlier, _ in checked_rows(connection, "restores", path):
        if event >= position and earlier < checkpoint_step:
            raise LedgerError(
                f"checkpoint {checkpoint_step} belongs to a lineage that ended when the run was restarted from "
                f"checkpoint {earlier}; its groups were given back. Remove it and resume from {earlier} or a later one"
            )


def checked_rows(connection: Connection, table: str, path: Path) -> Iterator[tuple[Any, ...]]:
    """The rows in order of their key, without the checksum that ends each. Raises LedgerError at a wrong one."""
    for *columns, crc in connection.execute(f"SELECT * FROM {table} ORDER BY 1"):
        if checksum(*columns) != crc:
            raise damaged(path, f"row {columns[0]!r} of table {table} does not have its checksum")
        yield tuple(columns)


def last_event(connection: Connection) -> int:
    (position,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
    return int(position)


def _held(connection: Connection, checkpoint_step: int, path: Path) -> Iterator[HeldGroup]:
    rows = connection.execute(
        """SELECT g.sequence, g.group_id, g.task, g.draw, g.state, g.train_step, g.tokens, g.statuses,
                  d.content, d.crc, r.content, r.oldest, r.oldest_newest, r.crc
           FROM groups g LEFT JOIN draws d USING (sequence) LEFT JOIN rollouts r USING (sequence)
           WHERE g.state != 'discarded' AND NOT (g.state = 'trained' AND g.train_step <= ?) ORDER BY g.sequence""",
        (checkpoint_step,),
    )
    for sequence, group_id, task, draw, state, train_step, tokens, statuses, *content in rows:
        drawn, drawn_crc, rollouts, oldest, oldest_newest, rollouts_crc = content
        if drawn is None:
            raise LedgerError(
                f"{path}: group {group_id!r} ({state} at step {train_step}) has no content any more; checkpoint "
                f"{checkpoint_step} is older than what the ledger keeps. Resume from a later checkpoint"
            )
        if rollouts is None and (tokens or set(statuses) - set(UNPLAYED)):
            raise damaged(path, f"the rollouts of group {group_id!r} are missing")
        if content_checksum(drawn, sequence) != drawn_crc:
            raise damaged(path, f"the prompt of group {group_id!r} does not have its checksum")
        if rollouts is not None and content_checksum(rollouts, sequence, oldest, oldest_newest) != rollouts_crc:
            raise damaged(path, f"the rollouts of group {group_id!r} do not have their checksum")
        yield HeldGroup(
            sequence,
            GroupState(state),
            train_step,
            tokens,
            decode_statuses(statuses),
            oldest,
            oldest_newest,
            StoredGroup(task, group_id, draw, drawn, rollouts),
        )
