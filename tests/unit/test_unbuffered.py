"""Files past the page cache: the same bytes as through it, whatever their length and whatever the file system can."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from penstock import unbuffered
from penstock.unbuffered import BLOCK, FileSum, sum_unbuffered, write_unbuffered

SIZES = [0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 4097]


def content(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def pieces(of: bytes) -> list[memoryview]:
    """None of them ends where a block does."""
    step = BLOCK // 3 + 7
    return [memoryview(of[start : start + step]) for start in range(0, len(of), step)] + [memoryview(b"")]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_holds_what_was_given_and_is_summed_as_it_was_given(tmp_path: Path, size: int) -> None:
    path, given = tmp_path / "file", content(size)
    path.write_bytes(b"longer " * 3)  # what was there before is gone
    expected = FileSum(size, hashlib.sha256(given).hexdigest())
    assert write_unbuffered(path, pieces(given)) == expected
    assert path.read_bytes() == given
    assert sum_unbuffered(path) == expected


def test_what_changed_on_the_disk_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written = write_unbuffered(path, [memoryview(content(2 * BLOCK))])
    with path.open("r+b") as file:
        file.seek(BLOCK + 5)
        file.write(b"x")
    found = sum_unbuffered(path)
    assert found.size == written.size and found.sha256 != written.sha256


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    write_unbuffered(tmp_path / "file", [])
    (tmp_path / "other").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("answer", [errno.EINVAL, errno.ENOTSUP])
@pytest.mark.parametrize("refuses", ["open", "write", "readv"])
def test_a_file_system_that_has_no_way_past_the_cache_is_used_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str, answer: int
) -> None:
    """Some say so when a file is opened, some when the first block comes."""
    original = getattr(os, refuses)
    refused: list[object] = []

    def refuse_once(*arguments: object, **more: object) -> object:
        direct = refuses != "open" or int(arguments[1]) & unbuffered.DIRECT  # type: ignore[call-overload]
        if direct and not refused:
            refused.append(arguments[0])
            raise OSError(answer, os.strerror(answer))
        return original(*arguments, **more)

    monkeypatch.setattr(os, refuses, refuse_once)
    given = content(BLOCK + 10)
    written = write_unbuffered(tmp_path / "file", pieces(given))
    assert sum_unbuffered(tmp_path / "file") == written == FileSum(len(given), hashlib.sha256(given).hexdigest())
    assert refused
    assert (tmp_path / "file").read_bytes() == given


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    open_before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="No space left"):
        write_unbuffered(tmp_path / "file", [memoryview(content(BLOCK))])
    assert sorted(Path("/proc/self/fd").iterdir()) == open_before


def test_memory_that_cannot_be_had_leaves_no_descriptor_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("mmap.mmap", none)
    open_before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="Cannot allocate memory"):
        write_unbuffered(tmp_path / "file", [])
    assert sorted(Path("/proc/self/fd").iterdir()) == open_before


def test_a_write_that_takes_a_part_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(
        os, "write", lambda descriptor, rest: original(descriptor, rest[: max(1, len(rest) // 4096 // 2 * 4096)])
    )
    given = content(BLOCK + 3)
    written = write_unbuffered(tmp_path / "file", [memoryview(given)])
    assert (tmp_path / "file").read_bytes() == given and written.size == len(given)
