"""`data/format-1.sqlite` was written by a Penstock of format 1: a run that was restarted once and then closed.

sums: 0 trained in step 1, 1 in step 2; 2 completed, with failures on record in words that format 1 allowed; 3 aborted
with partial tokens; 4 running, never played; 5 running, played before; 6 failed, 7 expired, 8 interrupted as often as
allowed, 9 filtered, 10 completed after tokens were dropped. code: 0 leased for step 3, 1 running.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import LedgerError
from penstock.replay import GroupState, Ledger, StaleRule, group_story, has_ledger, ledger_summary
from penstock.replay.schema import FORMAT, TABLES
from penstock.rollout import FailureReason, FinishReason, Status
from penstock.testing import read_history

S = Status
RULES = {"sums": StaleRule(9), "code": StaleRule(9)}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    directory = tmp_path / "old"
    directory.mkdir()
    shutil.copy(Path(__file__).parent / "data" / "format-1.sqlite", directory / "ledger.sqlite")
    return directory


def migrated(directory: Path) -> Path:
    asyncio.run(Ledger.open(directory).close())
    return directory


def form(path: Path) -> Any:
    """Tables, their columns and indexes."""
    connection = sqlite3.connect(path / "ledger.sqlite")
    try:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        indexes = connection.execute(
            "SELECT name, sql FROM sqlite_schema WHERE type = 'index' ORDER BY name"
        ).fetchall()
        version = connection.execute("PRAGMA user_version").fetchone()
        columns = {name: connection.execute(f"PRAGMA table_xinfo({name})").fetchall() for name in tables}
        # What SQLite calls the column of a rowid NOT NULL or not depends on how it was declared.
        return version, indexes, {name: [(c[1], c[2], c[5]) for c in rows] for name, rows in columns.items()}
    finally:
        connection.close()


def test_a_migrated_ledger_has_the_form_of_a_new_one(old: Path, tmp_path: Path) -> None:
    asyncio.run(Ledger.open(tmp_path / "new").close())
    assert form(old)[0] == (1,)
    assert form(migrated(old)) == form(tmp_path / "new")
    assert form(old)[0] == (FORMAT,)


def test_everything_that_an_old_ledger_held_is_given_back(old: Path, open_buffer: Any) -> None:
    buffer = open_buffer(old)
    restored = buffer.restore(1, RULES)
    assert restored.cursors == {"sums": 11, "code": 2}
    assert restored.trained == {"sums": 1, "code": 0}
    assert restored.returned == {GroupState.RUNNING: 3, GroupState.LEASED: 1, GroupState.TRAINED: 1}
    assert buffer.count_statuses("sums") == {S.COMPLETED: 3, S.ABORTED: 3, S.EXPIRED: 1, S.MAX_TRIES: 1}
    tokens = buffer.tokens
    tokens.check()
    assert (tokens.generated, tokens.trained, tokens.wasted) == (
        *(74, 6),
        {"filtered": 6, "retries_exhausted": 2, "retried": 3},
    )
    completed = buffer.take_batch({"sums": 3, "code": 1}, train_step=2)
    assert [group[0].group_id for group in completed["sums"]] == ["sums:1", "sums:2", "sums:10"]
    (first, second) = completed["sums"][1]
    assert first.response_ids.tolist() == [200, 200, 200, 7, 8]
    assert first.response_mask.tolist() == [1, 1, 1, 0, 0]
    assert first.model_steps.tolist() == [2] * 5
    assert [(turn.kind, turn.num_tokens, turn.segment, turn.name) for turn in first.turns] == [
        ("generate", 3, 0, ""),
        ("tool", 2, 0, ""),
    ]
    assert (first.num_tries, first.infrastructure_failures, first.ground_truth) == (1, 2, {"answer": 2})
    assert first.error is not None and first.error.reason is FailureReason.ENGINE_DIED
    assert second.error is not None and second.error.reason is FailureReason.AGENT_LOOP_ERROR
    assert second.error.message == "my own reason: a loop of a user said so"
    interrupted, never_played, running = buffer.get(9, "sums", S.ABORTED)
    assert [len(rollout.response) for rollout in interrupted] == [6, 5]
    assert interrupted[0].turns[-1].finish_reason is FinishReason.ABORT
    assert [len(rollout.response) for rollout in never_played] == [0, 0]
    assert [len(rollout.response) for rollout in running] == [4, 4]
    asyncio.run(buffer.close())


def test_summary_and_stories_read_a_migrated_ledger(old: Path) -> None:
    summary = ledger_summary(migrated(old))
    assert summary["conserved"] and summary["events"] == 40
    states = {state: n for state, n in summary["total"]["states"].items() if n}
    assert states == {
        "running": 3,
        "completed": 2,
        "aborted": 1,
        "expired": 1,
        "max_tries": 1,
        "leased": 1,
        "trained": 2,
        "discarded": 2,
    }
    assert summary["total"]["tokens"]["generated"] == 74
    failed = group_story(old, "sums:6")
    assert failed["why_not_trained"] == (
        "discarded, retries_exhausted (engine died: it was killed by signal 9; refused: the prompt is too long)"
    )
    again = group_story(old, "sums:1")
    states_of = [move["state"] for move in again["transitions"]]
    assert states_of == ["running", "aborted", "running", "completed", "leased", "trained"]


def test_the_history_of_an_old_run_is_told_whole(old: Path) -> None:
    connection = sqlite3.connect(migrated(old) / "ledger.sqlite")
    told = read_history(connection, old / "ledger.sqlite")
    connection.close()
    assert len(told.history.events) == 40
    assert told.cursors == {"sums": 11, "code": 2}


def test_who_only_reads_refuses_an_old_ledger_and_says_what_to_do(old: Path) -> None:
    before = (old / "ledger.sqlite").read_bytes()
    with pytest.raises(LedgerError, match=r"has format 1, .*resuming the run migrates it"):
        ledger_summary(old)
    with pytest.raises(LedgerError, match="has format 1"):
        group_story(old, "sums:1")
    assert (old / "ledger.sqlite").read_bytes() == before


def test_a_migration_that_is_killed_anywhere_is_made_again(
    old: Path, tmp_path: Path, new_disk: Any, copy_run: Any
) -> None:
    disk, kept = new_disk(), []
    live = copy_run(old, tmp_path / "live")
    disk.on_statement = lambda sql: kept.append(copy_run(live, tmp_path / f"killed{len(kept)}"))
    asyncio.run(Ledger.open(live, disk=disk).close())
    whole = form(live), ledger_summary(live)["tasks"]
    assert len(kept) > len(TABLES)
    for directory in kept:
        assert has_ledger(directory)
        migrated(directory)
        assert (form(directory), ledger_summary(directory)["tasks"]) == whole


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE events SET tokens = tokens + 1 WHERE id = 9",
        "UPDATE rollouts SET oldest = 7 WHERE sequence = 2",
    ],
)
def test_damage_is_not_sealed_by_a_migration(old: Path, damage: str) -> None:
    connection = sqlite3.connect(old / "ledger.sqlite", isolation_level=None)
    connection.execute(damage)
    connection.close()
    before = form(old)
    with pytest.raises(LedgerError, match="does not have its checksum"):
        Ledger.open(old)
    assert form(old) == before
