from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import StorageError
from penstock.replay.disk import Connection
from penstock.replay.writer import InlineWriter, ThreadWriter


class Row(msgspec.Struct):
    number: int
    size: int = 1


def insert(connection: Connection, rows: Sequence[Row]) -> None:
    connection.executemany("INSERT INTO numbers VALUES (?)", [(row.number,) for row in rows])


@pytest.fixture
def connect(tmp_path: Path, new_disk: Any) -> Any:
    def build(disk: Any = None) -> Connection:
        connection = (disk or new_disk()).connect(tmp_path / "numbers.sqlite")
        connection.execute("CREATE TABLE IF NOT EXISTS numbers (n INTEGER PRIMARY KEY)")
        return connection  # type: ignore[no-any-return]

    return build


def numbers(path: Path) -> list[int]:
    connection = sqlite3.connect(path / "numbers.sqlite")
    found = [n for (n,) in connection.execute("SELECT n FROM numbers ORDER BY n")]
    connection.close()
    return found


def test_what_was_waited_for_is_there_for_others(tmp_path: Path, connect: Any) -> None:
    async def main() -> None:
        writer = ThreadWriter(connect(), insert, tmp_path)
        ticket = [writer.submit(Row(n)) for n in range(5)][-1]
        await writer.wait(ticket)
        assert numbers(tmp_path) == list(range(5))
        await writer.wait(ticket)
        await writer.close()

    asyncio.run(main())


def test_what_nobody_waits_for_is_written_too(tmp_path: Path, connect: Any, new_disk: Any) -> None:
    disk, committed = new_disk(), threading.Event()
    disk.on_commit = committed.set

    async def main() -> None:
        writer = ThreadWriter(connect(disk), insert, tmp_path)
        writer.submit(Row(1))
        assert await asyncio.to_thread(committed.wait, 30)
        assert numbers(tmp_path) == [1]
        await writer.close()

    asyncio.run(main())


def test_jobs_that_arrive_together_share_one_transaction(tmp_path: Path, connect: Any, new_disk: Any) -> None:
    disk = new_disk()
    inside, go_on = threading.Event(), threading.Event()

    async def main() -> None:
        writer = ThreadWriter(connect(disk), insert, tmp_path)

        def hold(sql: str) -> None:
            if sql == "COMMIT":
                inside.set()
                assert go_on.wait(30)

        disk.on_statement = hold
        first = asyncio.create_task(writer.wait(writer.submit(Row(0))))
        assert await asyncio.to_thread(inside.wait, 30)
        later = [asyncio.create_task(writer.wait(writer.submit(Row(n)))) for n in range(1, 200)]
        await asyncio.sleep(0)
        assert not first.done()
        go_on.set()
        await asyncio.gather(first, *later)
        assert disk.statements.count("COMMIT") == 2
        await writer.close()

    asyncio.run(main())


def test_close_writes_what_is_queued(tmp_path: Path, connect: Any) -> None:
    async def main() -> None:
        writer = ThreadWriter(connect(), insert, tmp_path)
        for n in range(3000):
            writer.submit(Row(n))
        await writer.close()
        with pytest.raises(StorageError, match="is closed"):
            writer.submit(Row(9999))

    asyncio.run(main())
    assert numbers(tmp_path) == list(range(3000))


@pytest.mark.parametrize("sql", ["BEGIN IMMEDIATE", "INSERT INTO numbers VALUES (?)", "COMMIT"])
@pytest.mark.parametrize("error", [sqlite3.OperationalError("disk I/O error"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("threaded", [True, False])
def test_a_failure_is_final_and_has_its_cause(
    tmp_path: Path, connect: Any, new_disk: Any, sql: str, error: Exception, threaded: bool
) -> None:
    disk = new_disk()

    def fail(statement: str) -> None:
        if statement == sql and len(disk.statements) > 4:
            raise error

    async def main() -> None:
        writer: Any = (ThreadWriter if threaded else InlineWriter)(connect(disk), insert, tmp_path)
        await writer.wait(writer.submit(Row(1)))
        disk.statements.extend(["before the fault"] * 4)
        disk.on_statement = fail
        for n in (2, 3):
            with pytest.raises(
                StorageError, match=r"cannot be written: .*What was acknowledged before is there"
            ) as caught:
                await writer.wait(writer.submit(Row(n)))
            assert caught.value.__cause__ is error
        with pytest.raises(StorageError):
            await writer.wait(1)
        await writer.close()

    asyncio.run(main())
    assert numbers(tmp_path) == [1]


def test_a_failure_that_nobody_was_told_of_is_told_when_closing(tmp_path: Path, connect: Any, new_disk: Any) -> None:
    disk = new_disk()

    async def main() -> None:
        writer = ThreadWriter(connect(disk), insert, tmp_path)
        disk.fail_at = 0
        writer.submit(Row(1))
        with pytest.raises(StorageError, match="disk I/O error"):
            await writer.close()
        await writer.close()

    asyncio.run(main())
    assert numbers(tmp_path) == []


def test_a_full_disk_is_named_with_the_next_move(tmp_path: Path, connect: Any) -> None:
    async def main() -> None:
        connection = connect()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        writer = ThreadWriter(connection, insert, tmp_path)
        with pytest.raises(StorageError, match=r"database or disk is full.*free some space and resume"):
            for n in range(10_000):
                await writer.wait(writer.submit(Row(n)))
        await writer.close()

    asyncio.run(main())
    found = numbers(tmp_path)
    assert found == list(range(len(found))) != []


def test_a_disk_that_is_slow_but_takes_something_has_not_failed(
    tmp_path: Path, connect: Any, new_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = new_disk()
    monkeypatch.setattr("penstock.replay.writer.MAX_JOBS_PER_TRANSACTION", 1)

    async def main() -> None:
        writer = ThreadWriter(connect(disk), insert, tmp_path, wait_timeout_s=1.0)
        disk.on_statement = lambda sql: None if sql != "COMMIT" else time.sleep(0.25)
        tickets = [writer.submit(Row(n)) for n in range(8)]
        await writer.wait(tickets[-1])  # twice the timeout
        await writer.close()

    asyncio.run(main())
    assert numbers(tmp_path) == list(range(8))


def test_a_disk_that_hangs_after_a_rest_has_failed_too(tmp_path: Path, connect: Any, new_disk: Any) -> None:
    disk, go_on = new_disk(), threading.Event()

    async def main() -> None:
        writer = ThreadWriter(connect(disk), insert, tmp_path, wait_timeout_s=1.0)
        await writer.wait(writer.submit(Row(1)))
        await asyncio.sleep(0.7)
        disk.on_statement = lambda sql: None if sql != "COMMIT" else _hold(go_on)
        async with asyncio.timeout(20):
            with pytest.raises(StorageError, match=r"did not take a write within 1 s"):
                await writer.wait(writer.submit(Row(2)))
        go_on.set()
        await asyncio.to_thread(writer._thread.join, 30)
        await writer.close()

    asyncio.run(main())


def test_all_who_wait_share_one_timer(tmp_path: Path, connect: Any, new_disk: Any) -> None:
    async def main() -> None:
        writer = ThreadWriter(connect(new_disk()), insert, tmp_path)
        loop = asyncio.get_running_loop()
        timers: list[float] = []
        call_later = loop.call_later
        loop.call_later = lambda delay, *rest: (timers.append(delay), call_later(delay, *rest))[1]  # type: ignore[assignment,method-assign]
        for n in range(100):
            await writer.wait(writer.submit(Row(n)))
        await writer.close()
        assert len(timers) == 1

    asyncio.run(main())


def test_a_disk_that_hangs_has_failed(tmp_path: Path, connect: Any, new_disk: Any) -> None:
    disk, go_on = new_disk(), threading.Event()

    async def main() -> None:
        writer = ThreadWriter(connect(disk), insert, tmp_path, wait_timeout_s=0.05)
        disk.on_statement = lambda sql: None if sql != "COMMIT" else _hold(go_on)
        with pytest.raises(StorageError, match=r"did not take a write within 0.05 s"):
            await writer.wait(writer.submit(Row(1)))
        with pytest.raises(StorageError, match="did not take a write"):
            writer.submit(Row(2))
        go_on.set()
        await asyncio.to_thread(writer._thread.join, 30)
        await writer.close()

    asyncio.run(main())


def _hold(event: threading.Event) -> None:
    assert event.wait(30)


def test_a_producer_that_never_waits_is_stopped_before_memory_is(tmp_path: Path, connect: Any, new_disk: Any) -> None:
    disk, inside, go_on = new_disk(), threading.Event(), threading.Event()

    async def main() -> None:
        writer = ThreadWriter(connect(disk), insert, tmp_path, max_queued_bytes=100)

        def hold(sql: str) -> None:
            if sql == "COMMIT":
                inside.set()
                _hold(go_on)

        disk.on_statement = hold
        writer.submit(Row(0, size=100))
        assert await asyncio.to_thread(inside.wait, 30)
        writer.submit(Row(1, size=100))
        with pytest.raises(StorageError, match="the disk is 100 bytes behind"):
            writer.submit(Row(2, size=1))
        go_on.set()
        await writer.close()

    asyncio.run(main())
    assert numbers(tmp_path) == [0, 1]


def test_a_waiter_that_was_cancelled_harms_nobody(tmp_path: Path, connect: Any) -> None:
    async def main() -> None:
        writer = ThreadWriter(connect(), insert, tmp_path)
        gone = asyncio.create_task(writer.wait(writer.submit(Row(1))))
        await asyncio.sleep(0)
        gone.cancel()
        await writer.wait(writer.submit(Row(2)))
        await writer.close()

    asyncio.run(main())
    assert numbers(tmp_path) == [1, 2]
