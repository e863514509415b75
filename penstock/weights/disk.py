"""Weights through safetensors files, for engines that share a file system with the trainer.

A set of weights appears under its name only when it is complete and on the disk. The published set and the one before
stay: an engine that restarts, or is late, still finds what it was told to read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from penstock.errors import StorageError, WeightSyncError
from penstock.ports import WeightSource
from penstock.weights.digest import with_pool
from penstock.weights.stored import DiskWeights, joined_checksum, tensors_checksum

if TYPE_CHECKING:
    import torch

KEPT_SETS = 2


class DiskWriter:
    """Uses `directory` alone: what else it finds there of its own kind, it removes."""

    def __init__(self, directory: Path, *, max_file_bytes: int = 1 << 30) -> None:
        self._directory = directory
        self._max_file_bytes = max_file_bytes
        self._written: Path | None = None

    def write(self, source: WeightSource, model_step: int) -> DiskWeights:
        self._written = self._directory / f"model-step-{model_step}"
        return write_weights(source, self._written, self._max_file_bytes)

    def confirm(self) -> None:
        others = [path for path in self._directory.glob("model-step-*") if path != self._written]
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        complete = [path for path in others if not path.name.endswith(".part")]
        for path in [*complete[KEPT_SETS - 1 :], *(path for path in others if path.name.endswith(".part"))]:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        pass


def write_weights(source: WeightSource, target: Path, max_file_bytes: int = 1 << 30) -> DiskWeights:
    """Write all files beside `target`, flush them to the disk, then rename. Raises StorageError."""
    part = target.with_name(f"{target.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        files, checksum, num_bytes = with_pool(lambda pool: _write_files(source, part, max_file_bytes, pool))
        _flush(part)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        _flush(target.parent)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(part)
        raise StorageError(f"weights could not be written to {target}: {error}") from error
    return DiskWeights(path=str(target), files=files, checksum=checksum, num_bytes=num_bytes)


def _write_files(
    source: WeightSource, part: Path, max_file_bytes: int, pool: ThreadPoolExecutor
) -> tuple[tuple[str, ...], str, int]:
    from safetensors.torch import save_file

    checksums: list[str] = []
    files: list[str] = []
    total = 0
    names: set[str] = set()

    def write_file() -> None:
        name = f"weights-{len(files):05d}.safetensors"
        save_file(shard, part / name)
        with (part / name).open("rb") as file:
            os.fsync(file.fileno())
        files.append(name)
        checksums.append(tensors_checksum(shard, pool))
        shard.clear()

    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in source.tensors():
        if name in names:
            raise WeightSyncError(f"{name} was given twice")
        names.add(name)
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > max_file_bytes:
            write_file()
            size = 0
        # A file may not hold two tensors that share memory, such as tied embeddings.
        shares = any(other.data_ptr() == tensor.data_ptr() for other in shard.values())
        packed = tensor.detach().cpu().contiguous()
        shard[name] = packed.clone() if shares else packed
        size += num_bytes
        total += num_bytes
    write_file()
    return tuple(files), joined_checksum(checksums), total


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
