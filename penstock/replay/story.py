"""The ledger for people and tools: where all groups are, and what happened to one of them. Reads only.

Works on a run that lives, beside its writer, and on one that was killed.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.errors import LedgerError
from penstock.replay import schema
from penstock.replay.codec import decode_statuses
from penstock.replay.disk import Connection
from penstock.replay.ledger import LEDGER_FILE
from penstock.replay.lifecycle import GroupState
from penstock.replay.lock import LOCK_FILE, has_ended, read_holder
from penstock.replay.restore import last_event
from penstock.replay.schema import CURSORS, EVENTS, GROUPS, LIVE, META, RESTORES, WASTE, EventRow, GroupRow
from penstock.replay.table import DAMAGE, damaged

SHOWN = 20
"""Waiting groups that the text tells of."""


@contextmanager
def open_read_only(path: Path) -> Iterator[Connection]:
    """A run directory's ledger, or the file itself, in one consistent view until the end of the block.

    Leave soon: the writer's log grows while somebody reads. Raises LedgerError when there is none or it is damaged.
    """
    file = ledger_file(path)
    connection = _connect(file)
    try:
        connection.execute("BEGIN")
        schema.check_format(connection, file, oldest=schema.FORMAT)
        yield connection
    except DAMAGE as error:
        raise damaged(file, str(error)) from error
    finally:
        connection.close()


def ledger_file(path: Path) -> Path:
    """Raises LedgerError when there is none."""
    file = path / LEDGER_FILE if path.is_dir() else path
    if not file.is_file():
        raise LedgerError(f"{path} has no ledger ({LEDGER_FILE}); give the run directory of a run that was started")
    return file


def ledger_summary(path: Path) -> dict[str, Any]:
    """The conservation table per task and in total, discards by reason, tokens and their waste; plain data."""
    file = ledger_file(path)
    with open_read_only(path) as connection:
        meta = {fact.key: fact.value for fact in META.read(connection, file)}
        position = last_event(connection)
        (last_time,) = connection.execute("SELECT max(time) FROM events").fetchone()
        restarts = _restarts(connection, file)
        tasks = _tasks(connection, file)
        waiting = _waiting(connection, bool(restarts), _lost_driver(file))
        astray = _astray(connection)
    holder = read_holder(file.with_name(LOCK_FILE))
    return {
        "path": str(file),
        **meta,
        "events": position,
        "last_event_time": last_time,
        "last_holder": None if holder is None else {"pid": holder.pid, "host": holder.host},
        "restarts": restarts,
        "tasks": tasks,
        "total": _total(tasks),
        "waiting": waiting,
        "conserved": not astray and all(_conserved(task) for task in tasks.values()),
    }


def group_story(path: Path, group_id: str) -> dict[str, Any]:
    """All that happened to a group: when it was drawn, by which weights its tokens were made, which restarts of the
    driver it lived through, and why it was not trained."""
    return group_stories(path, [group_id])[0]


def group_stories(path: Path, group_ids: Iterable[str]) -> list[dict[str, Any]]:
    """The same of several, as of one moment."""
    file = ledger_file(path)
    lost_driver = _lost_driver(file)
    with open_read_only(path) as connection:
        restarts = _restarts(connection, file)
        return [_story(connection, file, group_id, restarts, lost_driver) for group_id in group_ids]


def _story(
    connection: Connection, file: Path, group_id: str, restarts: list[dict[str, Any]], lost_driver: str
) -> dict[str, Any]:
    group = GROUPS.find(connection, file, group_id=group_id)
    if group is None:
        raise LedgerError(f"{file} has no group {group_id!r}; ids look like {_example(connection)}")
    transitions = [
        {
            "event": event.id,
            "time": event.time,
            "state": event.state,
            "train_step": event.train_step,
            "reason": event.reason,
            "tokens": event.tokens,
            "model_steps": None if event.oldest is None else [event.oldest, event.newest],
            "wasted_tokens": {
                waste.reason: waste.tokens for waste in WASTE.read(connection, file, "WHERE event = ?", (event.id,))
            },
            "detail": event.detail,
        }
        for event in group_events(connection, group, file)
    ]
    kept = connection.execute("SELECT 1 FROM draws WHERE sequence = ?", (group.sequence,)).fetchone() is not None
    return {
        "group_id": group_id,
        "task": group.task,
        "draw": group.draw,
        "state": group.state,
        "train_step": group.train_step,
        "reason": group.reason,
        "tokens": group.tokens,
        "rollouts": [status.value for status in decode_statuses(group.statuses)],
        "content_kept": kept,
        "drawn": transitions[0]["time"],
        "model_steps": next((t["model_steps"] for t in reversed(transitions) if t["model_steps"]), None),
        "why_not_trained": _why_not_trained(group, transitions, lost_driver),
        "transitions": transitions,
        "restarts": [restart for restart in restarts if _lived_through(restart, group, transitions)],
    }


def group_events(connection: Connection, group: GroupRow, file: Path) -> list[EventRow]:
    """A group's own events, the first one first. Costs as much as there are, however many others."""
    events = []
    wanted: int | None = group.event
    while wanted is not None:
        event = EVENTS.find(connection, file, id=wanted)
        if event is None or event.sequence != group.sequence:
            raise damaged(file, f"event {wanted} of group {group.group_id!r} is missing")
        events.append(event)
        wanted = event.previous
    return events[::-1]


def render_summary(summary: Mapping[str, Any]) -> str:
    """The summary as text."""
    states = [state.value for state in GroupState]
    rows = [["task", "drawn", *(state.replace("_", " ") for state in states)]]
    shown = {**summary["tasks"], "total": summary["total"]} if len(summary["tasks"]) != 1 else summary["tasks"]
    rows += [[name, str(t["drawn"]), *(str(t["states"][state]) for state in states)] for name, t in shown.items()]
    lines = [
        f"{summary['path']}  run {summary['run_id']}, begun {summary['created']}, {summary['events']} events",
        *(f"restarted from checkpoint {r['checkpoint_step']} at {_clock(r['time'])}" for r in summary["restarts"]),
        "",
        *_table(rows),
        "",
        "every drawn group is in exactly one state"
        if summary["conserved"]
        else "NOT CONSERVED: groups and events disagree; the ledger is damaged",
    ]
    total = summary["total"]
    if total["discarded"]:
        lines.append("discarded: " + _counts(total["discarded"]))
    tokens = total["tokens"]
    lines.append(
        f"tokens: {tokens['generated']} generated = {tokens['trained']} trained + {tokens['held']} held"
        f" + {sum(tokens['wasted'].values())} wasted" + (f" ({_counts(tokens['wasted'])})" if tokens["wasted"] else "")
    )
    waiting = summary["waiting"]
    if waiting:
        lines += ["", "neither trained nor discarded:"]
        lines += [f"  {group['group_id']}: {group['why_not_trained']}" for group in waiting[:SHOWN]]
        if len(waiting) > SHOWN:
            lines.append(f"  and {len(waiting) - SHOWN} more; --json shows all")
    return "\n".join(lines)


def render_story(story: Mapping[str, Any]) -> str:
    """The story of a group as text."""
    made = story["model_steps"]
    lines = [
        f"group {story['group_id']} of task {story['task']}, draw {story['draw']}, drawn {_clock(story['drawn'])}",
        f"state {story['state']}, {story['tokens']} tokens"
        + ("" if made is None else f" by weights {made[0]}" + (f" to {made[1]}" if made[1] != made[0] else ""))
        + ("" if story["content_kept"] else "; content dropped"),
        "rollouts: " + _counts(Counter(story["rollouts"])),
        "",
    ]
    rows = [["time", "state", "step", "tokens", "weights", ""]]
    restarts = list(story["restarts"])
    for move in story["transitions"]:
        while restarts and restarts[0]["after_event"] < move["event"]:
            rows.append(_restart_row(restarts.pop(0)))
        steps = move["model_steps"]
        said = [move["reason"] or "", move["detail"]]
        said += [f"{n} tokens dropped ({why})" for why, n in move["wasted_tokens"].items()]
        rows.append(
            [
                _clock(move["time"]),
                move["state"],
                str(move["train_step"]),
                str(move["tokens"]),
                "" if steps is None else "-".join(map(str, sorted(set(steps)))),
                "; ".join(filter(None, said)),
            ]
        )
    rows += map(_restart_row, restarts)
    lines += _table(rows)
    if story["why_not_trained"]:
        lines += ["", f"not trained: {story['why_not_trained']}"]
    return "\n".join(lines)


def _connect(file: Path) -> sqlite3.Connection:
    uri = file.resolve().as_uri() + "?mode=ro"
    try:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)
        connection.execute("SELECT 1 FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError as error:
        # A directory that cannot be written has no place for the index of the log; without a log none is needed.
        log = file.with_name(file.name + "-wal")
        if log.exists() and log.stat().st_size:
            raise LedgerError(f"{file} cannot be read: {error}; copy the run directory and look at the copy") from error
        connection = sqlite3.connect(uri + "&immutable=1", uri=True, isolation_level=None)
    except DAMAGE as error:
        raise damaged(file, str(error)) from error
    return connection


def _restarts(connection: Connection, file: Path) -> list[dict[str, Any]]:
    return [
        {"checkpoint_step": restore.checkpoint_step, "after_event": restore.event, "time": restore.time}
        for restore in RESTORES.read(connection, file)
    ]


def _lived_through(restart: Mapping[str, Any], group: GroupRow, moves: list[dict[str, Any]]) -> bool:
    """Whether the group was drawn before the restart, and not at its end yet."""
    at_its_end = (
        group.state in (GroupState.TRAINED, GroupState.DISCARDED) and moves[-1]["event"] <= restart["after_event"]
    )
    return bool(moves[0]["event"] <= restart["after_event"] and not at_its_end)


def _restart_row(restart: Mapping[str, Any]) -> list[str]:
    return [
        _clock(restart["time"]),
        "",
        "",
        "",
        "",
        f"the driver was restarted, from checkpoint {restart['checkpoint_step']}",
    ]


def _tasks(connection: Connection, file: Path) -> dict[str, dict[str, Any]]:
    tasks: dict[str, dict[str, Any]] = {}
    rows = connection.execute(
        "SELECT task, state, reason, count(*), sum(tokens) FROM groups GROUP BY task, state, reason ORDER BY task"
    )
    for task, state, reason, groups, tokens in rows:
        found = tasks.setdefault(task, _empty())
        found["states"][state] += groups
        found["drawn"] += groups
        if state == GroupState.DISCARDED:
            found["discarded"][reason] = groups
            if tokens:
                found["tokens"]["wasted"][reason] = tokens
        else:
            found["tokens"]["trained" if state == GroupState.TRAINED else "held"] += tokens
    rows = connection.execute(
        """SELECT g.task, w.reason, sum(w.tokens) FROM waste w JOIN events e ON e.id = w.event
           JOIN groups g ON g.sequence = e.sequence GROUP BY g.task, w.reason"""
    )
    for task, reason, tokens in rows:
        wasted = tasks[task]["tokens"]["wasted"]
        wasted[reason] = wasted.get(reason, 0) + tokens
    for row in CURSORS.read(connection, file):
        tasks.setdefault(row.task, _empty())["cursor"] = row.cursor
    for found in tasks.values():
        tokens = found["tokens"]
        tokens["generated"] = tokens["trained"] + tokens["held"] + sum(tokens["wasted"].values())
    return tasks


def _waiting(connection: Connection, restarted: bool, lost_driver: str) -> list[dict[str, Any]]:
    """Every group that may still be trained, in order of drawing, and why it is not."""
    # Only a restart gives back what was trained.
    returned = "sequence IN (SELECT sequence FROM events WHERE state = 'trained')" if restarted else "0"
    rows = connection.execute(
        f"SELECT group_id, state, train_step, {returned} FROM groups WHERE {LIVE} ORDER BY sequence"
    )
    return [
        {
            "group_id": group_id,
            "state": state,
            "why_not_trained": _why_waiting(GroupState(state), train_step, bool(returned), lost_driver),
        }
        for group_id, state, train_step, returned in rows
    ]


def _empty() -> dict[str, Any]:
    return {
        "drawn": 0,
        "cursor": 0,
        "states": {state.value: 0 for state in GroupState},
        "discarded": {},
        "tokens": {"generated": 0, "trained": 0, "held": 0, "wasted": {}},
    }


def _total(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    total = _empty()
    for task in tasks.values():
        total["drawn"] += task["drawn"]
        total["cursor"] += task["cursor"]
        for state, n in task["states"].items():
            total["states"][state] += n
        for reason, n in task["discarded"].items():
            total["discarded"][reason] = total["discarded"].get(reason, 0) + n
        for part in ("generated", "trained", "held"):
            total["tokens"][part] += task["tokens"][part]
        for reason, n in task["tokens"]["wasted"].items():
            total["tokens"]["wasted"][reason] = total["tokens"]["wasted"].get(reason, 0) + n
    return total


def _conserved(task: Mapping[str, Any]) -> bool:
    return bool(
        task["drawn"] == sum(task["states"].values())
        and sum(task["discarded"].values()) == task["states"][GroupState.DISCARDED]
    )


def _astray(connection: Connection) -> int:
    """Groups whose state is not that of their last event."""
    (n,) = connection.execute(
        """SELECT count(*) FROM groups g LEFT JOIN events e ON e.id = g.event
           WHERE e.id IS NULL OR e.sequence != g.sequence OR e.state != g.state OR e.tokens != g.tokens"""
    ).fetchone()
    return int(n)


def _example(connection: Connection) -> str:
    row = connection.execute("SELECT group_id FROM groups ORDER BY sequence DESC LIMIT 1").fetchone()
    return repr(row[0]) if row else "'task:0', but nothing was drawn yet"


def _lost_driver(file: Path) -> str:
    """Words for what a process that is gone left unfinished; empty while it lives."""
    holder = read_holder(file.with_name(LOCK_FILE))
    if holder is None or not has_ended(holder):
        return ""
    return f" when process {holder.pid} on {holder.host} ended"


def _why_not_trained(group: GroupRow, moves: list[dict[str, Any]], lost_driver: str) -> str:
    if group.state == GroupState.TRAINED:
        return ""
    if group.state == GroupState.DISCARDED:
        detail = moves[-1]["detail"]
        return f"discarded, {group.reason}" + (f" ({detail})" if detail else "")
    returned = any(move["state"] == GroupState.TRAINED for move in moves)
    return _why_waiting(GroupState(group.state), group.train_step, returned, lost_driver)


def _why_waiting(state: GroupState, train_step: int, returned: bool, lost_driver: str) -> str:
    """`returned`: it was trained once, and a restart from an older checkpoint gave it back."""
    batch = f"in the batch of train step {train_step}"
    said = {
        GroupState.RUNNING: "it is being played",
        GroupState.COMPLETED: "it waits for a batch"
        + ("; it was trained before, in a lineage that a restart gave up" if returned else ""),
        GroupState.ABORTED: "it was interrupted and waits to be played again",
        GroupState.EXPIRED: f"it was too stale for train step {train_step} and waits to be made again",
        GroupState.MAX_TRIES: "it was interrupted as often as allowed and waits for a tail batch",
        GroupState.LEASED: f"it is {batch}, which is not committed",
    }
    if lost_driver:
        said[GroupState.RUNNING] = f"it was being played{lost_driver}; a resume plays it first"
        said[GroupState.LEASED] = f"it was {batch}, not committed{lost_driver}; a resume gives it back"
    return said[state]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in sorted(counts.items()))


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
