"""What a restart begins with, read from the ledger.

Only rows are read here; what becomes of each group is decided by `ReplayBuffer.restore`, as moves like any other, so
that a crash in the middle of a restart is one more crash and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from penstock.errors import LedgerError
from penstock.replay import history
from penstock.replay.codec import StoredGroup, decode_statuses, encode_statuses
from penstock.replay.disk import Connection
from penstock.replay.lifecycle import DiscardReason, GroupState
from penstock.replay.schema import (
    CURSORS,
    DRAWS,
    EVENTS,
    GROUPS,
    PAST,
    PAST_WASTE,
    RESTORES,
    ROLLOUTS,
    TURNS,
    GroupRow,
    TurnRow,
)
from penstock.replay.staleness import UNMADE, ModelSteps
from penstock.replay.table import damaged
from penstock.replay.turns import require_turns
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
    made: ModelSteps
    event: int
    """Its last one."""
    content: StoredGroup
    turns: list[TurnRow] = []
    """What finished since it began to be played."""


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
    """Costs what is live, not what was ever drawn: of the rest the sums are read.

    Raises LedgerError when a row does not have its checksum or a content that is needed is not there.
    """
    snapshot = Snapshot(position=last_event(connection), next_sequence=history.drawn_groups(connection))
    _read_past(connection, snapshot, checkpoint_step, path)
    live: list[GroupRow] = []
    for group in GROUPS.read(connection, path, "WHERE groups.sequence IN (SELECT sequence FROM draws)"):
        if group.event > snapshot.position:
            raise damaged(
                path, f"the last event is {snapshot.position}, but group {group.group_id!r} knows of {group.event}"
            )
        snapshot.states.setdefault(group.task, Counter())[GroupState(group.state)] += 1
        snapshot.trained.setdefault(group.task, 0)
        if group.state == GroupState.DISCARDED:
            assert group.reason is not None
            snapshot.discarded.setdefault(group.task, Counter())[DiscardReason(group.reason)] += 1
            snapshot.wasted[group.reason] += group.tokens
        elif group.state == GroupState.TRAINED and group.train_step <= checkpoint_step:
            snapshot.trained[group.task] += 1
            snapshot.trained_tokens += group.tokens
        else:
            live.append(group)
    _check_last_event(connection, snapshot.position, path)
    snapshot.cursors = {row.task: row.cursor for row in CURSORS.read(connection, path)}
    snapshot.held = list(_held(connection, live, checkpoint_step, path))
    return snapshot


def _read_past(connection: Connection, snapshot: Snapshot, checkpoint_step: int, path: Path) -> None:
    """What needs no content any more, in sums."""
    for past in PAST.read(connection, path):
        states = snapshot.states.setdefault(past.task, Counter())
        snapshot.trained.setdefault(past.task, 0)
        if past.outcome != GroupState.TRAINED:
            states[GroupState.DISCARDED] += past.groups
            snapshot.discarded.setdefault(past.task, Counter())[DiscardReason(past.outcome)] += past.groups
            snapshot.wasted[past.outcome] += past.tokens
        elif past.last_step > checkpoint_step:
            raise LedgerError(
                f"{path}: what task {past.task!r} trained up to step {past.last_step} has no content any more; "
                f"checkpoint {checkpoint_step} is older than what the ledger keeps. Resume from a later checkpoint"
            )
        else:
            states[GroupState.TRAINED] += past.groups
            snapshot.trained[past.task] += past.groups
            snapshot.trained_tokens += past.tokens
    for row in PAST_WASTE.read(connection, path):
        snapshot.wasted[row.reason] += row.tokens
    for waste in history.new_waste(connection, path):
        snapshot.wasted[waste.reason] += waste.tokens


def _check_last_event(connection: Connection, position: int, path: Path) -> None:
    """That the ledger ends as it was written: the last event is the last of its group."""
    if not position:
        return
    event = EVENTS.find(connection, path, id=position)
    group = GROUPS.find(connection, path, sequence=event.sequence) if event is not None else None
    if group is None or group.event != position:
        raise damaged(path, f"the last event is {position}, but its group does not know of it")


def check_lineage(connection: Connection, checkpoint_step: int, position: int, path: Path) -> None:
    """Whether a checkpoint that was written at `position` belongs to the lineage that the ledger is in."""
    last = last_event(connection)
    if position > last:
        raise damaged(
            path,
            f"it ends at event {last}, but checkpoint {checkpoint_step} was written after event {position}; "
            "acknowledged transactions are missing",
        )
    for restore in RESTORES.read(connection, path):
        earlier = restore.checkpoint_step
        if restore.event >= position and earlier < checkpoint_step:
            raise LedgerError(
                f"checkpoint {checkpoint_step} belongs to a lineage that ended when the run was restarted from "
                f"checkpoint {earlier}; its groups were given back. Remove it and resume from {earlier} or a later one"
            )


def last_event(connection: Connection) -> int:
    (position,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
    return int(position)


def _held(connection: Connection, live: Iterable[GroupRow], checkpoint_step: int, path: Path) -> Iterator[HeldGroup]:
    # The groups say which contents are needed: those of the others are many, and may be dropped.
    where = """CROSS JOIN groups USING (sequence)
               WHERE groups.state != 'discarded' AND NOT (groups.state = 'trained' AND groups.train_step <= ?)"""
    draws = DRAWS.read(connection, path, where, (checkpoint_step,))
    played = ROLLOUTS.read(connection, path, where, (checkpoint_step,))
    turns: dict[int, list[TurnRow]] = {}
    for turn in TURNS.read(connection, path):
        turns.setdefault(turn.sequence, []).append(turn)
    draw, rollouts = next(draws, None), next(played, None)
    for group in live:
        if draw is None or draw.sequence != group.sequence:
            raise damaged(path, f"the content of group {group.group_id!r} is missing")
        content, made = None, UNMADE
        if rollouts is not None and rollouts.sequence == group.sequence:
            content, made = rollouts.content, ModelSteps(rollouts.oldest, rollouts.oldest_newest)
            rollouts = next(played, None)
        elif group.tokens or set(group.statuses) - set(UNPLAYED):
            raise damaged(path, f"the rollouts of group {group.group_id!r} are missing")
        stored = StoredGroup(group.task, group.group_id, group.draw, draw.content, content)
        draw = next(draws, None)
        mine = turns.pop(group.sequence, [])
        if mine and group.state != GroupState.RUNNING:
            raise damaged(path, f"group {group.group_id!r} is {group.state}, but has turns of one that is played")
        statuses = decode_statuses(group.statuses)
        if mine:
            require_turns(stored.decode(statuses), mine)
        yield HeldGroup(
            group.sequence,
            GroupState(group.state),
            group.train_step,
            group.tokens,
            statuses,
            made,
            group.event,
            stored,
            mine,
        )
    if turns:
        raise damaged(path, f"turns of groups {sorted(turns)} are there, but those groups are not played")
