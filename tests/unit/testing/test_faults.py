from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import pytest

from penstock.replay.disk import SqliteDisk
from penstock.testing import DiskFailure, Faults, FaultyDisk, FaultyFiles


def insert(connection, number: int) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO events VALUES (?)", [(number,)])
    connection.execute("COMMIT")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    connection = SqliteDisk().connect(tmp_path / "file")
    connection.execute("CREATE TABLE events (id INTEGER)")
    connection.close()
    return tmp_path / "file"


@pytest.mark.parametrize("failure", list(DiskFailure))
def test_a_disk_fails_from_an_operation_on_and_can_still_be_read_until_it_is_healed(path: Path, failure) -> None:
    faults = Faults(at=4, failure=failure)
    connection = FaultyDisk(faults).connect(path)
    insert(connection, 1)  # four operations: begin, insert, commit, and after it
    with pytest.raises(sqlite3.OperationalError) as raised:
        insert(connection, 2)
    assert raised.value.sqlite_errorcode == failure.value[1]
    assert connection.execute("SELECT id FROM events").fetchall() == [(1,)]
    faults.heal()
    insert(connection, 3)
    assert connection.execute("SELECT id FROM events").fetchall() == [(1,), (3,)]
    connection.close()


def test_files_fail_as_the_kernel_says_it(tmp_path: Path) -> None:
    files = FaultyFiles(Faults(at=1, failure=DiskFailure.FULL))
    files.mkdir(tmp_path / "a")
    for operation in (
        lambda: files.mkdir(tmp_path / "b"),
        lambda: files.write(tmp_path / "b", b""),
        lambda: files.write_tensors(tmp_path / "b", {}),
        lambda: files.flush(tmp_path),
        lambda: files.rename(tmp_path / "a", tmp_path / "b"),
        lambda: files.remove(tmp_path / "b"),
        lambda: files.rmdir(tmp_path / "a"),
    ):
        with pytest.raises(OSError, match="No space left on device"):
            operation()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_was_committed_is_told_when_it_is_durable_and_what_was_rolled_back_is_not(path: Path) -> None:
    told: list[list] = []
    connection = FaultyDisk(Faults(), on_commit=told.append).connect(path)
    insert(connection, 1)
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO events VALUES (?)", [(2,)])
    connection.execute("ROLLBACK")
    insert(connection, 3)
    connection.close()
    assert told == [[(1,)], [(3,)]]


@pytest.mark.parametrize(("at", "survives"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (6, 1), (7, 2)])
def test_a_kill_leaves_exactly_what_was_committed_before_it(path: Path, at: int, survives: int) -> None:
    pid = os.fork()
    if pid == 0:
        connection = FaultyDisk(Faults(at)).connect(path)
        insert(connection, 1)
        insert(connection, 2)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    connection = SqliteDisk().connect(path)
    assert connection.execute("SELECT count(*) FROM events").fetchone() == (survives,)
    connection.close()
