from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.replay import Asked, DiscardReason, GroupState, ReplayBuffer, find_groups
from penstock.replay.schema import EVENTS, GROUPS
from penstock.replay.search import questions
from penstock.replay.story import group_events, open_read_only
from penstock.rollout import Status

G = GroupState


@pytest.fixture
def live(tmp_path: Path, groups: Any, open_buffer: Any) -> Any:
    """Of each task, draws 0 and 1 are trained in steps 1 and 2, 2 is filtered, 3 failed, 4 and 5 wait, 6 and 7 run."""

    async def main() -> ReplayBuffer:
        buffer: ReplayBuffer = open_buffer(tmp_path, threaded=False)
        for draw in range(8):
            for task in ("sums", "code"):
                group = groups.new(draw, task)
                buffer.draw(group, draw + 1)
                if draw in (2, 3):
                    reason = DiscardReason.FILTERED if draw == 2 else DiscardReason.FAILED
                    buffer.discard(groups.play(group), task, reason, train_step=1)
                elif draw < 6:
                    statuses = [Status.ABORTED, Status.COMPLETED] if draw == 5 else None
                    await groups.put(buffer, groups.play(group, statuses=statuses), threshold=9)
        for step in (1, 2):
            buffer.take_batch({"sums": 1, "code": 1}, train_step=step)
            buffer.commit(step)
        return buffer

    buffer = asyncio.run(main())
    yield tmp_path
    asyncio.run(buffer.close())


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [group["group_id"] for group in found]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (Asked(G.RUNNING), ["sums:6", "code:6", "sums:7", "code:7"]),
        (Asked(G.RUNNING, task="code"), ["code:6", "code:7"]),
        (Asked(G.ABORTED, task="sums"), ["sums:5"]),
        (Asked(G.TRAINED), ["sums:0", "code:0", "sums:1", "code:1"]),
        (Asked(G.TRAINED, train_step=2), ["sums:1", "code:1"]),
        (Asked(G.TRAINED, task="sums", train_step=1), ["sums:0"]),
        (Asked(G.DISCARDED), ["sums:2", "code:2", "sums:3", "code:3"]),
        (Asked(G.DISCARDED, reason=DiscardReason.FILTERED), ["sums:2", "code:2"]),
        (Asked(G.DISCARDED, task="code", reason=DiscardReason.FAILED, train_step=1), ["code:3"]),
        (Asked(G.DISCARDED, task="code", train_step=7), []),
        (Asked(G.COMPLETED, task="no such task"), []),
    ],
)
def test_groups_are_found_in_order_of_their_drawing(live: Path, asked: Asked, found: list[str]) -> None:
    whole = find_groups(live, asked)
    assert ids(whole) == found
    assert whole == json.loads(json.dumps(whole))
    paged: list[str] = []
    after = -1
    while page := find_groups(live, asked, after=after, limit=1):
        paged += ids(page)
        after = page[-1]["sequence"]
    assert paged == found


@pytest.mark.parametrize(
    "asked",
    [
        *(Asked(state) for state in GroupState),
        *(Asked(state, train_step=3) for state in GroupState),
        Asked(G.DISCARDED, reason=DiscardReason.EXPIRED),
    ],
)
def test_no_question_scans_the_table_or_sorts_its_answers(live: Path, asked: Asked) -> None:
    with open_read_only(live) as connection:
        for where, values in questions(asked, "sums"):
            sql = f"EXPLAIN QUERY PLAN SELECT * FROM groups {where} ORDER BY groups.sequence LIMIT 10"
            plan = [step[-1] for step in connection.execute(sql, (*values, 5))]
            assert len(plan) == 1 and plan[0].startswith("SEARCH groups USING"), plan


def test_the_story_of_a_group_reads_its_own_events_only(live: Path) -> None:
    with open_read_only(live) as connection:
        group = GROUPS.find(connection, live, group_id="code:1")
        assert group is not None
        own = group_events(connection, group, live)
        assert own == [event for event in EVENTS.read(connection, live) if event.sequence == group.sequence]
        assert [event.state for event in own] == ["running", "completed", "leased", "trained"]
        (plan,) = connection.execute("EXPLAIN QUERY PLAN SELECT * FROM events WHERE events.id = 1").fetchall()
        assert "SEARCH events USING INTEGER PRIMARY KEY" in plan[-1]
