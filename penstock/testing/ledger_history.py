"""The history of a run as its ledger tells it, for `check_history`.

    findings = check_ledger(run_dir)        lost, skipped, doubled: by the ledger and by the trajectories

The trajectories are the consumer's own word: what it took for a step is written down before the step is trained, apart
from the ledger, and an abandoned try of a step is overwritten by the next.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.errors import PenstockError
from penstock.replay import GroupState, Transition
from penstock.replay.disk import Connection
from penstock.replay.ledger import LEDGER_FILE
from penstock.replay.lifecycle import DiscardReason
from penstock.replay.schema import CURSORS, EVENTS, GROUPS, RESTORES
from penstock.replay.story import open_read_only
from penstock.testing.history import Batch, Event, Findings, History, Restart, check_history


class LedgerHistory(msgspec.Struct):
    history: History
    held: set[str]
    """Groups that still may be trained, with what is needed for that."""
    cursors: dict[str, int]


def read_history(connection: Connection, path: Path) -> LedgerHistory:
    """Every event in order; the batches are the steps that the ledger calls trained. Raises LedgerError."""
    groups = {group.sequence: group for group in GROUPS.read(connection, path)}
    restarts = list(RESTORES.read(connection, path))
    history = History()
    states: dict[int, GroupState] = {}
    for event in EVENTS.read(connection, path):
        while restarts and restarts[0].event < event.id:
            history.batches.append(Restart(restarts.pop(0).checkpoint_step))
        group, target = groups[event.sequence], GroupState(event.state)
        transition = Transition(
            group.group_id,
            group.task,
            states.get(event.sequence),
            target,
            event.train_step,
            DiscardReason(event.reason) if event.reason else None,
            sequence=event.sequence,
            draw=group.draw,
            tokens=event.tokens,
        )
        history.events.append(Event(transition, group.draw + 1 if event.sequence not in states else None))
        states[event.sequence] = target
        if target is GroupState.TRAINED:
            _add_trained(history, event.train_step, group.group_id)
    with_content = {sequence for (sequence,) in connection.execute("SELECT sequence FROM draws")}
    return LedgerHistory(
        history=history,
        held={group.group_id for sequence, group in groups.items() if sequence in with_content},
        cursors={row.task: row.cursor for row in CURSORS.read(connection, path)},
    )


def _add_trained(history: History, train_step: int, group_id: str) -> None:
    """A step's groups are committed one after another, and nothing else is committed meanwhile."""
    last = history.batches[-1] if history.batches else None
    if isinstance(last, Batch) and last.train_step == train_step:
        history.batches[-1] = Batch(train_step, (*last.group_ids, group_id), True)
    else:
        history.batches.append(Batch(train_step, (group_id,), True))


def check_ledger(run_dir: Path) -> Findings:
    """What is wrong with a run that came to its end, whatever happened to it on the way."""
    path = run_dir / LEDGER_FILE
    with open_read_only(run_dir) as connection:
        told = read_history(connection, path)
    findings = check_history(told.history, held=told.held)
    drawn: dict[str, int] = {}
    for event in told.history.events:
        if event.cursor is not None:
            drawn[event.transition.task] = max(drawn.get(event.transition.task, 0), event.cursor)
    if drawn != told.cursors:
        findings.skipped.append(f"the samplers are at {told.cursors}, the groups drawn end at {drawn}")
    seen = History(told.history.events, list(read_batches(run_dir)))
    findings.lost += check_history(seen, held=told.held).lost
    findings.doubled += check_history(seen, held=told.held).doubled
    return findings


class _Line(msgspec.Struct):
    group_id: str


def read_batches(run_dir: Path) -> list[Batch]:
    """What was trained in each step of a finished run, by its trajectories."""
    batches = []
    for path in sorted((run_dir / "trajectories").glob("step-*.jsonl")):
        lines = msgspec.json.Decoder(_Line).decode_lines(path.read_bytes())
        group_ids = tuple(dict.fromkeys(line.group_id for line in lines))
        batches.append(Batch(int(path.stem.removeprefix("step-")), group_ids, True))
    if not batches:
        raise PenstockError(f"{run_dir} has no trajectories of train steps")
    return sorted(batches, key=lambda batch: batch.train_step)
