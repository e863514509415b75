"""Large files that nobody reads soon, written and read past the page cache where the system can.

A checkpoint is several times as large as the model. Through the page cache, cores that training needs would copy each
of its bytes once more, into memory that others had used. What is written is summed on its way, as it was in memory: a
file that is read back is compared with that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

BLOCK = 8 << 20
"""Bytes that are handed over at once, from memory and to places that any disk takes."""
DIRECT: int = getattr(os, "O_DIRECT", 0)
_NO_WAY = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems answer that have no way past the cache."""


class FileSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    sha256: str


def write_unbuffered(path: Path, pieces: Iterable[memoryview]) -> FileSum:
    """A file of these bytes, with the permissions of any other file. It is not flushed. Raises OSError."""
    digest, size, filled = hashlib.sha256(), 0, 0
    with _File(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        for piece in pieces:
            while piece:
                taken = min(len(piece), BLOCK - filled)
                file.block[filled : filled + taken] = piece[:taken]
                piece, filled = piece[taken:], filled + taken
                if filled == BLOCK:
                    digest.update(file.block)
                    file.write(file.block)
                    size, filled = size + BLOCK, 0
        rest = file.block[:filled]
        digest.update(rest)
        file.go_through_the_cache()  # it is not a whole block
        file.write(rest)
    return FileSum(size + filled, digest.hexdigest())


def sum_unbuffered(path: Path) -> FileSum:
    """Of a file that is flushed, as the device has it. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with _File(path, os.O_RDONLY) as file:
        # Not until nothing comes: behind the end of a file there is no place from which a whole block could be read.
        while size < file.size and (count := file.read()):
            digest.update(file.block[:count])
            size += count
    return FileSum(size, digest.hexdigest())


class _File:
    def __init__(self, path: Path, flags: int) -> None:
        self.block = memoryview(mmap.mmap(-1, BLOCK))
        """Memory that the system can hand to the disk as it is."""
        try:
            self._descriptor = os.open(path, flags | DIRECT, 0o666)
        except OSError as error:
            if error.errno not in _NO_WAY:
                raise
            self._descriptor = os.open(path, flags, 0o666)
        if hasattr(os, "posix_fadvise"):  # what the cache holds of it already is forgotten; no more than advice
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def write(self, content: memoryview) -> None:
        while content:
            written = self._past_the_cache(lambda rest=content: os.write(self._descriptor, rest))  # type: ignore[misc]
            content = content[written:]

    def read(self) -> int:
        """Bytes that came into the block."""
        return self._past_the_cache(lambda: os.readv(self._descriptor, [self.block]))

    def go_through_the_cache(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~DIRECT)

    def _past_the_cache(self, move: Callable[[], int]) -> int:
        try:
            return move()
        except OSError as error:
            if error.errno not in _NO_WAY:
                raise
        self.go_through_the_cache()  # some file systems refuse only now
        return move()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)
