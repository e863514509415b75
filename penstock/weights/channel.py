"""One way to publish, whatever way the bytes travel: write them once, tell the engines where, compare what arrived.

A `Writer` is where the weights are: in this process, or in the rank that gathers them. A `WeightStore` is how the
channel reaches it from here.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import msgspec

from penstock.ports import Engine, Published, WeightSource
from penstock.weights.confirm import compare_checksums, late, load_confirmed
from penstock.weights.stored import StoredWeights


class WriterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which way the bytes travel. It may travel itself, to whoever has the weights."""

    kind: Literal["shared_memory", "disk", "broadcast"]
    directory: str = ""
    """Of `disk`."""
    max_file_bytes: int = 1 << 30
    address: str = "127.0.0.1"
    """Of `broadcast`: where engines ask. One of the machine that has the weights."""
    backend: Literal["gloo", "nccl"] = "gloo"
    through_memory: bool = True
    """Engines on the sender's machine read its memory and are sent nothing."""
    bucket_bytes: int = 64 << 20
    """Memory besides the weights themselves, at most; and what is sent at a time."""
    timeout_s: float = 300.0


class Writer(Protocol):
    """Calls block."""

    def write(self, source: WeightSource, model_step: int) -> StoredWeights:
        """Raises WeightSyncError or StorageError; what was confirmed is still there."""
        ...

    def confirm(self) -> None:
        """What was written last is served; it stays until the next is confirmed."""
        ...

    def close(self) -> None: ...


class WeightStore(Protocol):
    async def write(self, model_step: int) -> StoredWeights: ...

    async def confirm(self) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class DistantWeights(Protocol):
    """Weights that other processes have and write themselves."""

    def store(self, settings: WriterSettings) -> WeightStore: ...


def build_writer(settings: WriterSettings) -> Writer:
    from penstock.weights.broadcast import WeightServer
    from penstock.weights.disk import DiskWriter
    from penstock.weights.shared_memory import SharedMemoryWriter

    if settings.kind == "disk":
        return DiskWriter(Path(settings.directory), max_file_bytes=settings.max_file_bytes)
    if settings.kind == "shared_memory":
        return SharedMemoryWriter(bucket_bytes=settings.bucket_bytes)
    return WeightServer(
        settings.address,
        backend=settings.backend,
        through_memory=settings.through_memory,
        bucket_bytes=settings.bucket_bytes,
        timeout_s=settings.timeout_s,
    )


class OwnWeights:
    """The store of weights that this process has."""

    def __init__(self, weights: WeightSource, writer: Writer) -> None:
        self._weights = weights
        self._writer = writer

    async def write(self, model_step: int) -> StoredWeights:
        return await asyncio.to_thread(self._writer.write, self._weights, model_step)

    async def confirm(self) -> None:
        await asyncio.to_thread(self._writer.confirm)

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.close)


class StoredChannel:
    """`engine` is one engine, or the controller in front of several."""

    def __init__(self, store: WeightStore, engine: Engine, *, timeout_s: float = 300.0) -> None:
        self._store = store
        self._engine = engine
        self._timeout_s = timeout_s

    async def publish(self, model_step: int) -> Published:
        """Raises WeightSyncError when no engine confirmed the bytes that were written, StorageError when none were."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._timeout_s):
                stored = await self._store.write(model_step)
                loaded = await load_confirmed(self._engine, stored, model_step)
                compare_checksums(model_step, stored.checksum, loaded.checksum)
                await self._store.confirm()
        except TimeoutError:
            raise late(model_step, self._timeout_s) from None
        return Published(model_step=model_step, num_bytes=stored.payload, seconds=loop.time() - started)

    async def close(self) -> None:
        await self._store.close()


def build_channel(weights: WeightSource | DistantWeights, engine: Engine, settings: WriterSettings) -> StoredChannel:
    if isinstance(weights, DistantWeights):
        return StoredChannel(weights.store(settings), engine, timeout_s=settings.timeout_s)
    return StoredChannel(OwnWeights(weights, build_writer(settings)), engine, timeout_s=settings.timeout_s)
