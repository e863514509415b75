"""The file: format, damage, faults of the disk."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import LedgerError, StorageError
from penstock.replay import GroupState, Ledger, ReplayBuffer, StaleRule, has_ledger
from penstock.replay.disk import SqliteDisk
from penstock.replay.schema import FORMAT
from penstock.rollout import Status

RULES = {"sums": StaleRule(3)}


async def run_some(buffer: ReplayBuffer, groups: Any, n: int = 6, first: int = 0) -> None:
    """Draw n groups; the first half is completed, one of them trained."""
    made = [groups.new(draw) for draw in range(first, first + n)]
    for group in made:
        buffer.draw(group, group[0].draw + 1)
    for group in made[: n // 2]:
        await groups.put(buffer, groups.play(group, tokens=40), threshold=3)
    buffer.take_batch({"sums": 1}, train_step=1)
    buffer.commit(1)
    await buffer.flush()


def state(directory: Path, *, disk: Any = None, position: int | None = None) -> Any:
    """What a restart finds, all of it."""
    buffer = ReplayBuffer(storage=Ledger.open(directory, disk=disk, threaded=False))
    try:
        restored = buffer.restore(1, RULES, position=position)
        aborted = buffer.get(99, "sums", Status.ABORTED)
        batch = buffer.take_batch({"sums": buffer.count("sums", Status.COMPLETED)}, train_step=2)
        tokens = buffer.tokens
        return restored, aborted, batch, buffer.conservation(), (tokens.generated, tokens.trained, +tokens.wasted)
    finally:
        asyncio.run(buffer.close())


@pytest.fixture
def made(tmp_path: Path, groups: Any, open_buffer: Any, copy_run: Any) -> tuple[Path, Path]:
    """The same run, once closed and once killed, so that its log is still there."""

    async def main() -> Path:
        buffer = open_buffer(tmp_path / "closed")
        await run_some(buffer, groups)
        killed = copy_run(tmp_path / "closed", tmp_path / "killed")
        await buffer.close()
        return killed  # type: ignore[no-any-return]

    killed = asyncio.run(main())
    assert (killed / "ledger.sqlite-wal").stat().st_size > 10_000
    assert not (tmp_path / "closed" / "ledger.sqlite-wal").exists()
    return tmp_path / "closed", killed


def test_a_killed_run_leaves_what_a_closed_one_does(made: tuple[Path, Path]) -> None:
    closed, killed = made
    assert state(killed) == state(closed)


def test_settings_make_a_commit_survive_a_power_failure(tmp_path: Path) -> None:
    connection = SqliteDisk().connect(tmp_path / "l")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    connection.close()


def test_a_second_opener_is_refused_with_the_holders_pid_and_host(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    program = f"from pathlib import Path; from penstock.replay import Ledger; Ledger.open(Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"LedgerError: {tmp_path} is in use by process {os.getpid()} on host {socket.gethostname()}" in done.stderr
    asyncio.run(ledger.close())
    asyncio.run(Ledger.open(tmp_path).close())


def change(path: Path, sql: str) -> None:
    connection = sqlite3.connect(path / "ledger.sqlite", isolation_level=None)
    connection.execute(sql)
    connection.close()


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        (
            f"PRAGMA user_version = {FORMAT + 1}",
            f"has format {FORMAT + 1}, this version of Penstock reads up to {FORMAT}",
        ),
        ("PRAGMA user_version = 0", "has format 0, which cannot be migrated"),
        ("PRAGMA application_id = 7", "is not a ledger of Penstock"),
    ],
)
def test_another_format_is_refused_and_left_alone(made: tuple[Path, Path], sql: str, said: str) -> None:
    closed, _ = made
    change(closed, sql)
    before = (closed / "ledger.sqlite").read_bytes()
    with pytest.raises(LedgerError, match=said):
        Ledger.open(closed)
    assert (closed / "ledger.sqlite").read_bytes() == before
    assert not (closed / "ledger.sqlite-wal").exists()


def test_a_ledger_whose_making_was_killed_is_made_again(tmp_path: Path, new_disk: Any, copy_run: Any) -> None:
    assert not has_ledger(tmp_path)
    disk, kept = new_disk(), []
    disk.on_statement = lambda sql: kept.append(copy_run(tmp_path / "live", tmp_path / f"killed{len(kept)}"))
    asyncio.run(Ledger.open(tmp_path / "live", disk=disk).close())
    assert len(kept) > 10
    for directory in kept:
        ledger = Ledger.open(directory)
        assert ledger.position == 0 and ledger.load(0).next_sequence == 0
        asyncio.run(ledger.close())
    assert has_ledger(tmp_path / "live")


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE groups SET tokens = tokens + 1 WHERE sequence = 2",
        "UPDATE groups SET state = 'trained' WHERE sequence = 1",
        "UPDATE rollouts SET content = zeroblob(length(content)) WHERE sequence = 1",
        "UPDATE rollouts SET oldest = 7 WHERE sequence = 1",
        "UPDATE draws SET content = x'00' WHERE sequence = 5",
        "UPDATE cursors SET cursor = 2",
        "DELETE FROM groups WHERE sequence = 4",
        "DELETE FROM groups WHERE sequence = 5",
        "DELETE FROM rollouts WHERE sequence = 1",
        "DELETE FROM events WHERE id = (SELECT max(id) FROM events)",
        "INSERT INTO waste VALUES (1, 'aborted', 5, 0)",
    ],
)
def test_a_row_that_was_changed_is_named(made: tuple[Path, Path], sql: str) -> None:
    closed, _ = made
    change(closed, sql)
    with pytest.raises(LedgerError, match=r"ledger.sqlite is damaged: .*Nothing was changed"):
        state(closed)


@pytest.mark.parametrize("which", ["closed", "killed"])
def test_a_flipped_bit_is_found_or_harmless(
    made: tuple[Path, Path], tmp_path: Path, copy_run: Any, new_disk: Any, which: str
) -> None:
    """In the log's last transaction it may look like a torn write; then the position of a checkpoint tells."""
    source = made[0] if which == "closed" else made[1]
    whole = state(copy_run(source, tmp_path / "whole"))
    position = whole[3].drawn + 3 + 2
    rng = random.Random(0)
    file = "ledger.sqlite" if which == "closed" else "ledger.sqlite-wal"
    content = (source / file).read_bytes()
    used = [at for at, byte in enumerate(content) if byte]
    found = 0
    for number in range(150):
        flipped = bytearray(content)
        flipped[(at := rng.choice(used))] ^= 1 << rng.randrange(8)
        for given in (None, position):
            damaged = copy_run(source, tmp_path / f"flipped{number}{given}")
            (damaged / file).write_bytes(flipped)
            try:
                after = state(damaged, disk=new_disk(), position=given)
            except (LedgerError, StorageError):
                found += 1
                break
            if after == whole:
                break
            assert given is None and which == "killed", f"byte {at} of {file}"
    assert found > 75


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\0" + bytes(4000)])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(content)
    with pytest.raises((LedgerError, StorageError), match=r"ledger\.sqlite"):
        Ledger.open(tmp_path)
    (tmp_path / "ledger.sqlite").unlink()
    asyncio.run(Ledger.open(tmp_path).close())


@pytest.mark.parametrize("keep", [0.3, 0.7])
def test_a_truncated_file_is_refused(made: tuple[Path, Path], keep: float) -> None:
    closed, _ = made
    content = (closed / "ledger.sqlite").read_bytes()
    (closed / "ledger.sqlite").write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(LedgerError, match="is damaged"):
        state(closed)


@pytest.mark.parametrize("error", [sqlite3.OperationalError("disk I/O error"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("threaded", [True, False])
def test_a_fault_at_any_statement_stops_the_run_and_keeps_what_was_acknowledged(
    tmp_path: Path, groups: Any, open_buffer: Any, new_disk: Any, error: Exception, threaded: bool
) -> None:
    async def until_the_fault(directory: Path, fail_at: int) -> tuple[set[str], int]:
        disk = new_disk()
        buffer = open_buffer(directory, disk=disk, threaded=threaded)
        disk.statements.clear()
        disk.fail_at, disk.error = fail_at, error
        acknowledged: set[str] = set()
        try:
            for draw in range(4):
                group = groups.new(draw)
                buffer.draw(group, draw + 1)
                await groups.put(buffer, groups.play(group), threshold=3)
                acknowledged.add(group[0].group_id)
        except StorageError as stopped:
            assert stopped.__cause__ is error
            with pytest.raises(StorageError):
                await buffer.flush()
            with pytest.raises(StorageError):
                buffer.draw(groups.new(50), 51)
        await buffer.close()
        return acknowledged, len(disk.statements)

    _, statements = asyncio.run(until_the_fault(tmp_path / "whole", 10_000))
    for fail_at in range(0, statements, 1 if threaded else 3):
        directory = tmp_path / f"fault{fail_at}"
        acknowledged, _ = asyncio.run(until_the_fault(directory, fail_at))
        buffer = open_buffer(directory)
        buffer.restore(0, RULES)
        buffer.conservation().check()
        n = buffer.count("sums", Status.COMPLETED)
        found = {group[0].group_id for group in buffer.take_batch({"sums": n}, train_step=1)["sums"]}
        assert found >= acknowledged
        asyncio.run(buffer.close())
    assert statements > 20


WORK = """
import asyncio, sys
from pathlib import Path
from penstock.replay import ReplayBufferConfig
from penstock.rollout import Prompt, RolloutState, Status, Tokens, Verdict

async def play(buffer, draw):
    group = [RolloutState(prompt=Prompt(), task_name="sums", group_id=f"sums:{draw}", rollout_id=f"sums:{draw}:{k}",
                          draw=draw) for k in range(2)]
    buffer.draw(group, draw + 1)
    for rollout in group:
        rollout.response = Tokens().append([draw] * 64, [0.0] * 64, model_step=0)
        rollout.reward, rollout.status = Verdict(1.0), Status.COMPLETED
    buffer.put(group, "sums", model_step=0, current_train_step=1, stale_threshold=3)
    await buffer.flush()
    print(group[0].group_id, flush=True)

async def main():
    buffer = ReplayBufferConfig(storage="sqlite").build(Path(sys.argv[1]))
    for first in range(0, 100_000, 8):
        await asyncio.gather(*(play(buffer, draw) for draw in range(first, first + 8)))

asyncio.run(main())
"""


@pytest.mark.parametrize("after", [1, 20, 100])
def test_what_a_killed_process_acknowledged_is_there(tmp_path: Path, after: int) -> None:
    with subprocess.Popen([sys.executable, "-c", WORK, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().strip() for _ in range(after)]
        process.kill()
        acknowledged += process.stdout.read().split("\n")[:-1]
    buffer = ReplayBuffer(storage=Ledger.open(tmp_path))
    restored = buffer.restore(0, RULES)
    buffer.conservation().check()
    n = buffer.count("sums", Status.COMPLETED)
    found = buffer.take_batch({"sums": n}, train_step=1)["sums"]
    assert {group[0].group_id for group in found} >= set(acknowledged)
    assert all(list(rollout.response_ids) == [rollout.draw] * 64 for group in found for rollout in group)
    assert restored.cursors["sums"] == n + buffer.count("sums", Status.ABORTED)
    asyncio.run(buffer.close())


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        Ledger.open(tmp_path / "run")


def test_a_buffer_that_disagrees_with_the_file_stops(tmp_path: Path, groups: Any, open_buffer: Any) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path, threaded=False)
        group = groups.new(0)
        buffer.draw(group, 1)
        change(tmp_path, "UPDATE groups SET state = 'aborted'")
        with pytest.raises(StorageError, match="not in the state that the buffer has it in"):
            await groups.put(buffer, groups.play(group))
        await buffer.close()

    asyncio.run(main())


def test_the_event_loop_goes_on_while_the_disk_is_slow(
    tmp_path: Path, groups: Any, open_buffer: Any, new_disk: Any
) -> None:
    async def main() -> None:
        disk, inside, go_on = new_disk(), threading.Event(), threading.Event()
        buffer = open_buffer(tmp_path, disk=disk)

        def hold(sql: str) -> None:
            if sql == "COMMIT":
                inside.set()
                assert go_on.wait(30)

        disk.on_statement = hold
        group = groups.new(0)
        buffer.draw(group, 1)
        stored = asyncio.create_task(groups.put(buffer, groups.play(group), threshold=3))
        assert await asyncio.to_thread(inside.wait, 30)
        # Decided, counted and visible; only its acknowledgement waits.
        assert buffer.count("sums", Status.COMPLETED) == 1
        buffer.draw(groups.new(1), 2)
        assert not stored.done()
        go_on.set()
        assert await stored is Status.COMPLETED
        await buffer.close()

    asyncio.run(main())


def test_what_is_recorded_is_what_it_was_then(tmp_path: Path, groups: Any, open_buffer: Any, new_disk: Any) -> None:
    """A group goes on changing after it was recorded; the ledger has it as it was."""

    async def main() -> None:
        buffer = open_buffer(tmp_path)
        group = groups.new(0)
        buffer.draw(group, 1)
        await groups.put(buffer, groups.play(group, tokens=2, statuses=[Status.ABORTED] * 2), threshold=3)
        (running,) = buffer.get(1, "sums", Status.ABORTED)
        groups.play(running, tokens=50)
        await buffer.flush()
        await buffer.close()
        buffer = open_buffer(tmp_path)
        buffer.restore(0, RULES)
        (back,) = buffer.get(1, "sums", Status.ABORTED)
        assert [len(rollout.response) for rollout in back] == [2, 2]
        assert buffer.state_count("sums", GroupState.RUNNING) == 1
        await buffer.close()

    asyncio.run(main())
