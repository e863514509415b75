"""How checkpoints reach the disk. Fault injection replaces this and nothing else."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.learn.save import write_tensors
from penstock.unbuffered import FileSum, sum_unbuffered

if TYPE_CHECKING:
    from torch import Tensor


class Files:
    """Each method is one operation; all but `read` and `checksum` change the disk. They raise OSError."""

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)

    def write_tensors(self, path: Path, tensors: dict[str, Tensor]) -> FileSum:
        return write_tensors(path, tensors)

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
        """`from_disk`: of a flushed file, as the device itself has it."""
        if from_disk:
            return sum_unbuffered(path)
        with path.open("rb") as file:
            # SHA-256 has instructions of its own in today's processors: twice as fast as BLAKE2 where it matters.
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileSum(size=file.tell(), sha256=digest)
