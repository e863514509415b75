"""How checkpoints reach the disk. Fault injection replaces this and nothing else."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.learn.save import write_tensors

if TYPE_CHECKING:
    from torch import Tensor


class FileSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    sha256: str


class Files:
    """Each method is one operation; all but `read` and `checksum` change the disk. They raise OSError."""

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)

    def write_tensors(self, path: Path, tensors: dict[str, Tensor]) -> None:
        write_tensors(path, tensors)

    def flush(self, path: Path) -> None:
        """fsync of a file, or of a directory: which names it holds."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, name: Path) -> None:
        """A file replaces the one of that name; a directory needs a free name."""
        path.replace(name)

    def remove(self, path: Path) -> None:
        path.unlink()

    def rmdir(self, path: Path) -> None:
        path.rmdir()

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def checksum(self, path: Path, *, from_disk: bool = False) -> FileSum:
        """`from_disk` forgets what the page cache holds of a flushed file, so that the device itself is read."""
        with path.open("rb") as file:
            if from_disk and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            # SHA-256 has instructions of its own in today's processors: twice as fast as BLAKE2 where it matters.
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileSum(size=file.tell(), sha256=digest)
