from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import LedgerError
from penstock.replay import wal


@given(st.binary(max_size=50).map(lambda half: half * 8), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_the_checksum_is_that_of_the_loop_over_words(content: bytes, first: int, second: int) -> None:
    expected = [first, second]
    words = [int.from_bytes(content[at : at + 4], "big") for at in range(0, len(content), 4)]
    for a, b in zip(words[::2], words[1::2], strict=True):
        expected[0] = (expected[0] + a + expected[1]) % 2**32
        expected[1] = (expected[1] + b + expected[0]) % 2**32
    assert wal.extend((first, second), content, ">u4") == tuple(expected)


@pytest.fixture
def log(tmp_path: Path) -> bytearray:
    """The log of six transactions of one page each, and a seventh of two."""
    path = tmp_path / "live.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b BLOB)")
    for n in range(5):
        connection.execute("INSERT INTO t VALUES (?, x'00')", (n,))
    connection.execute("INSERT INTO t VALUES (9, zeroblob(4096))")
    content = bytearray((tmp_path / "live.sqlite-wal").read_bytes())
    connection.close()
    return content


def check(directory: Path, content: bytes) -> None:
    (directory / "l.sqlite-wal").write_bytes(content)
    wal.check(directory / "l.sqlite")


FRAME = wal.FRAME_HEADER + 4096


def test_a_whole_log_passes_and_so_does_none(tmp_path: Path, log: bytearray) -> None:
    check(tmp_path, log)
    wal.check(tmp_path / "absent.sqlite")
    check(tmp_path, b"")


def test_a_log_cut_off_anywhere_is_a_torn_write(tmp_path: Path, log: bytearray) -> None:
    for n in range(wal.HEADER, len(log), 1000):
        check(tmp_path, log[:n])


@pytest.mark.parametrize("at", [0, 5, 9, 13, 17, 22, 24, 2000, 4000])
def test_a_bit_flipped_before_the_last_transactions_is_found(tmp_path: Path, log: bytearray, at: int) -> None:
    frames = (len(log) - wal.HEADER) // FRAME
    for frame in range(frames - 4):
        broken = bytearray(log)
        broken[wal.HEADER + frame * FRAME + at] ^= 4
        with pytest.raises(LedgerError, match=f"frame {frame} does not have its checksum, and later transactions"):
            check(tmp_path, broken)


def test_a_damaged_header_is_found(tmp_path: Path, log: bytearray) -> None:
    for at in range(wal.HEADER):
        broken = bytearray(log)
        broken[at] ^= 1
        with pytest.raises(LedgerError, match="header does not have its checksum"):
            check(tmp_path, broken)


def test_frames_of_an_earlier_round_behind_the_end_are_not_damage(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b BLOB)")
    for n in range(20):
        connection.execute("INSERT INTO t VALUES (?, zeroblob(3000))", (n,))
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    for n in range(20, 24):
        connection.execute("INSERT INTO t VALUES (?, zeroblob(3000))", (n,))
    wal.check(path)
    connection.close()
