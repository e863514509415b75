"""Weights through safetensors files, for engines that share a file system with the trainer.

A set of weights appears under its name only when it is complete and on the disk. The published set and the one before
stay: an engine that restarts, or is late, still finds what it was told to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.errors import StorageError, WeightSyncError
from penstock.ports import Engine, Published, WeightSource
from penstock.weights.confirm import compare_checksums, late, load_confirmed
from penstock.weights.digest import with_pool
from penstock.weights.stored import DiskWeights, joined_checksum, tensors_checksum

KEPT_SETS = 2


class DiskChannel:
    """Uses `directory` alone: what else it finds there of its own kind, it removes."""

    def __init__(
        self,
        weights: WeightSource,
        engine: Engine,
        directory: Path,
        *,
        timeout_s: float = 600.0,
        max_file_bytes: int = 1 << 30,
    ) -> None:
        self._weights = weights
        self._engine = engine
        self._directory = directory
        self._timeout_s = timeout_s
        self._max_file_bytes = max_file_bytes

    async def publish(self, model_step: int) -> Published:
        """Raises WeightSyncError when no engine confirmed the files, StorageError when they could not be written."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._timeout_s):
                stored = await asyncio.to_thread(
                    write_weights, self._weights, self._directory / f"model-step-{model_step}", self._max_file_bytes
                )
                loaded = await load_confirmed(self._engine, stored, model_step)
                compare_checksums(model_step, stored.checksum, loaded.checksum)
        except TimeoutError:
            raise late(model_step, self._timeout_s) from None
        await asyncio.to_thread(self._remove_old, Path(stored.path))
        return Published(model_step=model_step, num_bytes=stored.num_bytes, seconds=loop.time() - started)

    async def close(self) -> None:
        pass

    def _remove_old(self, current: Path) -> None:
        others = [path for path in self._directory.glob("model-step-*") if path != current]
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        complete = [path for path in others if not path.name.endswith(".part")]
        for path in [*complete[KEPT_SETS - 1 :], *(path for path in others if path.name.endswith(".part"))]:
            shutil.rmtree(path, ignore_errors=True)


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
