"""What is over costs nothing: sums instead of rows, checked beside the run."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import LedgerError
from penstock.replay import DiscardReason, GroupState, Ledger, ReplayBuffer, StaleRule
from penstock.replay.disk import Connection, SqliteDisk
from penstock.testing.long_run import write_trained

RULES = {"sums": StaleRule(10**9)}


class CountingDisk:
    """Counts SQLite's own steps, which are as many on a slow machine as on a fast one."""

    def __init__(self) -> None:
        self.hundreds = 0

    def connect(self, path: Path) -> Connection:
        connection = SqliteDisk().connect(path)
        assert isinstance(connection, sqlite3.Connection)
        connection.set_progress_handler(self._count, 100)
        return connection

    def _count(self) -> int:
        self.hundreds += 1
        return 0


def change(directory: Path, sql: str) -> None:
    connection = sqlite3.connect(directory / "ledger.sqlite")
    with connection:
        connection.execute(sql)
    connection.close()


async def resume(directory: Path, step: int, groups: Any, *, live: int = 20, disk: Any = None) -> ReplayBuffer:
    """Open without a check at once, restore, and train a step with what waits and new groups."""
    buffer = ReplayBuffer(storage=Ledger.open(directory, disk=disk, checked_at_once=0))
    drawn = buffer.restore(step, RULES).cursors["sums"]
    for draw in range(drawn, drawn + live):
        group = groups.new(draw)
        buffer.draw(group, draw + 1)
        await groups.put(buffer, groups.play(group), step=step + 1, threshold=10**9)
    buffer.take_batch({"sums": live}, train_step=step + 1)
    buffer.commit(step + 1)
    await buffer.flush()
    await buffer.prune(step)
    return buffer


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, int]]:
    """Ledgers of runs that trained so many groups, and their last step; opened once, so that they have their sums."""
    made = {}
    for length in (300, 6000):
        directory = tmp_path_factory.mktemp(str(length))
        made[length] = directory, write_trained(directory, length)
        asyncio.run(Ledger.open(directory).close())
    return made


def test_opening_and_a_step_cost_what_is_live_however_much_was_trained(
    lengths: dict[int, tuple[Path, int]], tmp_path: Path, groups: Any, copy_run: Any
) -> None:
    counted = {}
    for length, (directory, step) in lengths.items():
        disk = CountingDisk()
        buffer = asyncio.run(closed(resume(copy_run(directory, tmp_path / str(length)), step, groups, disk=disk)))
        assert buffer.conservation().states[GroupState.TRAINED] == length + 20
        assert buffer.tokens.trained == length * 512 + 20 * 6
        counted[length] = disk.hundreds
    assert counted[6000] < counted[300] * 1.1 + 5


async def closed(resuming: Any) -> ReplayBuffer:
    buffer: ReplayBuffer = await resuming
    await buffer.close()
    return buffer


def test_sums_of_what_was_dropped_are_those_of_all_rows(tmp_path: Path, groups: Any) -> None:
    async def main() -> None:
        buffer = ReplayBuffer(storage=Ledger.open(tmp_path))
        for draw in range(12):
            group = groups.new(draw)
            buffer.draw(group, draw + 1)
            groups.play(group)
            if draw % 4 == 3:
                buffer.forget_response(group[0], "retried")
                buffer.discard(group, "sums", DiscardReason.FILTERED, train_step=1)
            else:
                await groups.put(buffer, group, threshold=99)
        for step in (1, 2, 3):
            buffer.take_batch({"sums": 2}, train_step=step)
            buffer.commit(step)
            await buffer.flush()
            await buffer.prune(step - 1)
        before, tokens = buffer.conservation(), buffer.tokens
        await buffer.close()
        told = await told_by(tmp_path)
        assert told == (before, tokens)
        # An earlier version drops contents without the sums.
        change(tmp_path, "UPDATE past SET groups = groups + 1")
        with pytest.raises(LedgerError, match="does not have its checksum"):
            Ledger.open(tmp_path)
        change(tmp_path, "DELETE FROM past")
        assert await told_by(tmp_path) == told
        change(tmp_path, "DROP TABLE past")
        assert await told_by(tmp_path) == told

    asyncio.run(main())


async def told_by(directory: Path) -> Any:
    buffer = ReplayBuffer(storage=Ledger.open(directory))
    buffer.restore(3, {"sums": StaleRule(99)})
    found = buffer.conservation(), buffer.tokens
    buffer.tokens.check()
    await buffer.close()
    return found


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("UPDATE groups SET tokens = 1 WHERE sequence = 7", "row 7 of table groups does not have its checksum"),
        ("DELETE FROM groups WHERE sequence = 7", "group 7 of the order of draws is missing"),
    ],
)
def test_damage_of_what_is_over_is_named_at_once_in_a_small_ledger_and_ends_the_run_of_a_large_one(
    lengths: dict[int, tuple[Path, int]], tmp_path: Path, groups: Any, copy_run: Any, sql: str, said: str
) -> None:
    directory, step = lengths[300]
    change(damaged := copy_run(directory, tmp_path / "damaged"), sql)
    with pytest.raises(LedgerError, match=said):
        Ledger.open(damaged)

    async def main() -> None:
        ledger = Ledger.open(damaged, checked_at_once=0)
        buffer = ReplayBuffer(storage=ledger)
        buffer.restore(step, RULES)
        assert ledger.checking is not None
        ledger.checking.wait()
        with pytest.raises(LedgerError, match=said):
            buffer.draw(groups.new(300), 301)
        with pytest.raises(LedgerError, match=said):
            await buffer.flush()
        await buffer.close()

    asyncio.run(main())


def test_a_check_beside_the_run_ends_with_it(
    lengths: dict[int, tuple[Path, int]], tmp_path: Path, copy_run: Any
) -> None:
    async def main() -> None:
        ledger = Ledger.open(copy_run(lengths[6000][0], tmp_path / "run"), checked_at_once=0)
        assert ledger.checking is not None
        await ledger.close()
        assert ledger.checking.damage is None

    asyncio.run(main())


def test_a_group_that_is_over_is_not_given_back(
    lengths: dict[int, tuple[Path, int]], tmp_path: Path, copy_run: Any, groups: Any
) -> None:
    directory, step = lengths[300]
    with pytest.raises(LedgerError, match=f"trained up to step {step} has no content any more"):
        asyncio.run(resume(copy_run(directory, tmp_path / "run"), step - 1, groups))
