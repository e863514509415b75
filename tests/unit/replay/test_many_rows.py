from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock.replay import GroupState, ReplayBuffer, StaleRule, group_story
from penstock.replay.codec import RolloutsEncoder, encode_rollouts
from penstock.replay.disk import ROWS_PER_STATEMENT, Connection, SqliteDisk


@pytest.fixture
def connection(tmp_path: Path) -> Any:
    connection = SqliteDisk().connect(tmp_path / "numbers.sqlite")
    connection.execute("CREATE TABLE numbers (n INTEGER PRIMARY KEY, content BLOB)")
    yield connection
    connection.close()


def content(connection: Connection) -> list[tuple[int, bytes]]:
    return connection.execute("SELECT * FROM numbers ORDER BY n").fetchall()


@pytest.mark.parametrize("n", [0, 1, 2, 3, 100, ROWS_PER_STATEMENT[0] - 1, ROWS_PER_STATEMENT[0], 700])
def test_rows_are_written_moved_and_deleted_however_many_there_are(connection: Connection, n: int) -> None:
    rows = [(number, bytes([number % 256]) * 10) for number in range(n)]
    connection.executemany("INSERT INTO numbers VALUES (?, ?)", iter(rows))
    assert content(connection) == rows
    before = connection.total_changes
    connection.executemany(
        "UPDATE numbers SET content = column2 FROM (VALUES (?, ?)) WHERE n = column1",
        [(number, b"new") for number, _ in rows],
    )
    assert connection.total_changes - before == n
    assert content(connection) == [(number, b"new") for number, _ in rows]
    connection.executemany("DELETE FROM numbers WHERE n IN (VALUES (?))", [(number,) for number, _ in rows[1:]])
    assert content(connection) == [(number, b"new") for number, _ in rows[:1]]


def test_a_row_that_is_there_already_is_refused_as_by_sqlite(connection: Connection) -> None:
    connection.executemany("INSERT INTO numbers VALUES (?, ?)", [(70, b"")])
    with pytest.raises(sqlite3.IntegrityError):
        connection.executemany("INSERT INTO numbers VALUES (?, ?)", [(number, b"") for number in range(100)])


def test_all_moves_of_a_group_in_one_transaction_are_told_and_the_last_one_counts(
    tmp_path: Path, groups: Any, open_buffer: Any
) -> None:
    async def main() -> ReplayBuffer:
        buffer: ReplayBuffer = open_buffer(tmp_path)
        made = [groups.new(draw) for draw in range(3)]
        for group in made:
            buffer.draw(group, group[0].draw + 1)
        await buffer.flush()
        stored = [asyncio.create_task(groups.put(buffer, groups.play(group), threshold=3)) for group in made[:2]]
        await asyncio.sleep(0)
        buffer.draw(groups.new(3), 4)
        buffer.take_batch({"sums": 1}, train_step=1)
        buffer.commit(1)
        await asyncio.gather(*stored)
        await buffer.close()
        return buffer

    before = asyncio.run(main())
    assert [move["state"] for move in group_story(tmp_path, "sums:0")["transitions"]] == [
        *("running", "completed", "leased", "trained")
    ]
    after: ReplayBuffer = open_buffer(tmp_path)
    assert after.restore(1, {"sums": StaleRule(3)}).cursors == {"sums": 4}
    states = before.conservation().states
    assert states[GroupState.TRAINED] == states[GroupState.COMPLETED] == 1 and states[GroupState.RUNNING] == 2
    moved = {**states, GroupState.RUNNING: 0, GroupState.ABORTED: 2}
    assert after.conservation().states == moved
    asyncio.run(after.close())


def test_an_encoder_that_was_used_before_leaves_nothing_behind(groups: Any) -> None:
    encoder = RolloutsEncoder()
    large, small = groups.play(groups.new(1), tokens=5000), groups.play(groups.new(2), tokens=1)
    for group in (small, large, small):
        assert encoder.encode(group) == encode_rollouts(group)
