from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import LedgerError
from penstock.replay import (
    DiscardReason,
    ReplayBuffer,
    StaleRule,
    group_story,
    ledger_summary,
    render_story,
    render_summary,
)
from penstock.rollout import Failure, FailureReason, Status

S = Status
RULES = {"sums": StaleRule(2), "code": StaleRule(2)}


class Clock:
    """A second an event."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


async def run_some(buffer: ReplayBuffer, groups: Any) -> None:
    """sums: 0 trained, 1 expired, 2 interrupted, 3 running, 4 failed; code: 0 leased."""
    sums, code = [groups.new(draw) for draw in range(5)], groups.new(0, "code")
    for group in [*sums, code]:
        buffer.draw(group, group[0].draw + 1)
    groups.play(sums[0], tokens=4)
    buffer.forget_response(sums[0][0], "retried")
    sums[0][0].status = S.INIT
    await groups.put(buffer, groups.play(sums[0], model_step=1))
    buffer.take_batch({"sums": 1}, train_step=1)
    buffer.commit(1)
    await groups.put(buffer, groups.play(sums[1]))
    await groups.put(buffer, groups.play(code, model_step=2))
    buffer.refresh_staleness(3)
    await groups.put(buffer, groups.play(sums[2], model_step=2, statuses=[S.ABORTED, S.COMPLETED]), step=3)
    groups.play(sums[4], tokens=1)
    sums[4][1].fail(Failure(FailureReason.ENGINE_DEADLINE, "the engine said nothing for 60 s", infrastructure=True))
    buffer.discard(sums[4], "sums", DiscardReason.RETRIES_EXHAUSTED, train_step=3)
    await buffer.flush()
    buffer.take_batch({"code": 1}, train_step=3)
    await buffer.flush()


@pytest.fixture
def live(tmp_path: Path, groups: Any, open_buffer: Any) -> Any:
    """The directory of a run that goes on."""
    buffer = open_buffer(tmp_path / "run", threaded=False, clock=Clock())
    asyncio.run(run_some(buffer, groups))
    yield tmp_path / "run"
    asyncio.run(buffer.close())


def test_the_summary_of_a_live_run_is_its_conservation_table(live: Path) -> None:
    summary = ledger_summary(live)
    assert summary == json.loads(json.dumps(summary))
    assert summary["conserved"]
    assert summary["last_holder"]["pid"] == os.getpid()
    sums = summary["tasks"]["sums"]
    assert sums["drawn"] == sums["cursor"] == 5
    assert {state: n for state, n in sums["states"].items() if n} == {
        "running": 1,
        "aborted": 1,
        "expired": 1,
        "trained": 1,
        "discarded": 1,
    }
    assert sums["discarded"] == {"retries_exhausted": 1}
    assert sums["tokens"] == {
        "generated": 25,
        "trained": 7,
        "held": 12,
        "wasted": {"retried": 4, "retries_exhausted": 2},
    }
    assert summary["tasks"]["code"]["states"]["leased"] == 1
    assert summary["total"]["drawn"] == 6
    assert summary["total"]["tokens"]["generated"] == 31


def test_a_dead_run_reads_the_same_whether_killed_or_closed(
    live: Path, tmp_path: Path, copy_run: Any, open_buffer: Any
) -> None:
    killed = copy_run(live, tmp_path / "killed")
    same = ("tasks", "total", "run_id", "events", "conserved")
    whole = ledger_summary(live)
    assert {key: ledger_summary(killed)[key] for key in same} == {key: whole[key] for key in same}
    asyncio.run(open_buffer(killed).close())
    assert not (killed / "ledger.sqlite-wal").exists()
    closed = ledger_summary(killed / "ledger.sqlite")
    assert {key: closed[key] for key in same} == {key: whole[key] for key in same}


def test_reading_changes_nothing(live: Path, tmp_path: Path, copy_run: Any) -> None:
    killed = copy_run(live, tmp_path / "killed")
    before = {path.name: path.read_bytes() for path in killed.iterdir()}
    ledger_summary(killed)
    group_story(killed, "sums:0")
    after = {path.name: path.read_bytes() for path in killed.iterdir() if not path.name.endswith("-shm")}
    assert after == before


def test_the_summary_as_text_names_every_reason(live: Path) -> None:
    text = render_summary(ledger_summary(live))
    assert "task   drawn  running  completed  aborted  expired  max tries  leased  trained  discarded" in text
    assert "total  6      1        0          1        1        0          1       1        1" in text
    assert "every drawn group is in exactly one state" in text
    assert "discarded: 1 retries exhausted" in text
    assert "31 generated = 7 trained + 18 held + 6 wasted (4 retried, 2 retries exhausted)" in text


@pytest.mark.parametrize(
    ("group_id", "why"),
    [
        ("sums:0", ""),
        ("sums:1", "it was too stale for train step 3 and waits to be made again"),
        ("sums:2", "it was interrupted and waits to be played again"),
        ("sums:3", "it is being played"),
        ("sums:4", "discarded, retries_exhausted (engine_deadline: the engine said nothing for 60 s)"),
        ("code:0", "it is in the batch of train step 3, which is not committed"),
    ],
)
def test_a_story_says_why_a_group_was_not_trained(live: Path, group_id: str, why: str) -> None:
    story = group_story(live, group_id)
    assert story == json.loads(json.dumps(story))
    assert story["why_not_trained"] == why
    assert (f"not trained: {why}" in render_story(story)) == bool(why)


def test_a_story_has_every_transition_with_time_step_and_weights(live: Path) -> None:
    story = group_story(live, "sums:0")
    moves = story["transitions"]
    assert [(move["state"], move["train_step"]) for move in moves] == [
        ("running", 0),
        ("completed", 1),
        ("leased", 1),
        ("trained", 1),
    ]
    assert [move["time"] for move in moves] == sorted(move["time"] for move in moves)
    assert story["drawn"] == moves[0]["time"]
    assert moves[1]["model_steps"] == story["model_steps"] == [0, 1]
    assert moves[1]["wasted_tokens"] == {"retried": 4}
    text = render_story(story)
    assert "group sums:0 of task sums, draw 0" in text
    assert "7 tokens by weights 0 to 1" in text
    assert "4 tokens dropped (retried)" in text


def test_the_story_outlives_the_content(live: Path, tmp_path: Path, copy_run: Any, open_buffer: Any) -> None:
    async def main() -> None:
        buffer = open_buffer(copy_run(live, tmp_path / "later"))
        buffer.restore(1, RULES)
        await buffer.prune(1)
        await buffer.close()

    asyncio.run(main())
    story = group_story(tmp_path / "later", "sums:0")
    assert not story["content_kept"]
    assert [move["state"] for move in story["transitions"]] == ["running", "completed", "leased", "trained"]
    assert story["model_steps"] == [0, 1]
    assert "content dropped" in render_story(story)
    assert ledger_summary(tmp_path / "later")["restarts"][0]["checkpoint_step"] == 1
    assert "restarted from checkpoint 1" in render_summary(ledger_summary(tmp_path / "later"))


def test_a_group_given_back_says_that_it_was_trained_before(
    live: Path, tmp_path: Path, copy_run: Any, open_buffer: Any
) -> None:
    async def main() -> None:
        buffer = open_buffer(copy_run(live, tmp_path / "later"))
        buffer.restore(0, RULES)
        await buffer.flush()
        await buffer.close()

    asyncio.run(main())
    story = group_story(tmp_path / "later", "sums:0")
    assert "trained before, in a lineage that a restart gave up" in story["why_not_trained"]
    told = render_story(story).splitlines()
    [restarted] = [number for number, line in enumerate(told) if "the driver was restarted, from checkpoint 0" in line]
    assert " trained " in told[restarted - 1] and " completed " in told[restarted + 1]


def test_a_story_has_the_restarts_that_the_group_lived_through(
    live: Path, tmp_path: Path, copy_run: Any, open_buffer: Any
) -> None:
    async def restart(run_dir: Path) -> None:
        buffer = open_buffer(run_dir)
        buffer.restore(1, RULES)
        await buffer.flush()
        await buffer.close()

    later = copy_run(live, tmp_path / "later")
    asyncio.run(restart(later))
    stories = {group_id: group_story(later, group_id) for group_id in ("sums:0", "sums:2", "sums:3", "sums:4")}
    assert {group_id: len(story["restarts"]) for group_id, story in stories.items()} == {
        "sums:0": 0,  # trained for good
        "sums:2": 1,  # waited before it, and waits
        "sums:3": 1,  # was being played
        "sums:4": 0,  # discarded
    }
    moves, [restarted] = stories["sums:3"]["transitions"], stories["sums:3"]["restarts"]
    assert [move["state"] for move in moves] == ["running", "aborted"]
    assert moves[0]["event"] <= restarted["after_event"] < moves[1]["event"] and restarted["checkpoint_step"] == 1
    assert render_story(stories["sums:2"]).count("the driver was restarted, from checkpoint 1") == 1


def test_an_unknown_group_and_a_missing_ledger_are_named(live: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="has no group 'sums:99'; ids look like 'code:0'"):
        group_story(live, "sums:99")
    with pytest.raises(LedgerError, match="has no ledger"):
        ledger_summary(tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(b"something else entirely" * 50)
    with pytest.raises(LedgerError, match="is damaged"):
        ledger_summary(tmp_path)


def test_groups_that_disagree_with_their_events_are_said(live: Path, tmp_path: Path, copy_run: Any) -> None:
    copied = copy_run(live, tmp_path / "copied")
    connection = sqlite3.connect(copied / "ledger.sqlite", isolation_level=None)
    connection.execute("UPDATE groups SET state = 'trained' WHERE group_id = 'sums:3'")
    connection.close()
    summary = ledger_summary(copied)
    assert not summary["conserved"]
    assert "NOT CONSERVED" in render_summary(summary)
    with pytest.raises(LedgerError, match="row 3 of table groups does not have its checksum"):
        group_story(copied, "sums:3")


def test_a_ledger_in_a_directory_that_cannot_be_written_is_read(live: Path, tmp_path: Path, copy_run: Any) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    closed = copy_run(live, tmp_path / "closed")
    connection = sqlite3.connect(closed / "ledger.sqlite")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    closed.chmod(0o555)
    try:
        assert ledger_summary(closed)["conserved"]
    finally:
        closed.chmod(0o755)
