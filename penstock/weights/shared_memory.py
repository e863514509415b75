"""Weights to engine processes of this machine, through copies in shared memory that all of them read.

There are two, written in turn: the one that was confirmed stays as it is until the next is confirmed, because it is
what a restarted engine is given, also one that restarts while a sync is under way. An engine that can use the memory
in place holds it until it has the next. They are written by a few threads, at most a bucket ahead of what was summed,
so the extra memory is the size of the weights twice, for any number of engines, and few tensors of the trainer are held
at a time.

The memory is an anonymous file (`memfd`), which engines open as /proc/<trainer>/fd/<n>: nothing is left behind, even
by kill -9. That is Linux; elsewhere use the disk channel.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from penstock.errors import ConfigError, WeightSyncError
from penstock.ports import LoadedWeights, WeightSource
from penstock.weights.digest import THREADS, Bytes, Piece, TensorEntry, digest_pieces, dtype_name, pieces, tensor_bytes
from penstock.weights.stored import SharedMemoryWeights, StoredWeights

ALIGNMENT = 64


class SharedMemoryBuffer:
    """Memory for the weights that were confirmed and for those that come next.

    Calls block; `write` may come from any thread, one at a time.
    """

    def __init__(self, *, bucket_bytes: int = 64 << 20) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("shared memory needs Linux (memfd_create); use engines.channel='disk' here")
        self._bucket_bytes = bucket_bytes
        self._confirmed: _Segment | None = None
        self._next: _Segment | None = None
        self._writing = threading.Lock()
        self._closed = False

    def write(self, source: WeightSource) -> SharedMemoryWeights:
        """Copy the weights. What was written before and not confirmed is gone, unless somebody still reads it.

        Raises WeightSyncError when the source fails or a name comes twice.
        """
        with self._writing:
            if self._closed:
                raise WeightSyncError("the shared memory was closed")
            segment = self._free_segment()
            try:
                with ThreadPoolExecutor(THREADS, thread_name_prefix="penstock-weights") as pool:
                    return _Writer(segment, pool, self._bucket_bytes).write(source)
            except WeightSyncError:
                raise
            except Exception as error:
                raise WeightSyncError(f"the weights could not be written to shared memory: {error!r}") from error
            finally:
                segment.unlock()

    def confirm(self) -> None:
        """What was written last is served now: it stays until the next is confirmed."""
        with self._writing:
            self._confirmed, self._next = self._next, self._confirmed

    def close(self) -> None:
        """Readers keep what they have open."""
        with self._writing:
            self._closed = True
            for segment in filter(None, (self._confirmed, self._next)):
                segment.close()
            self._confirmed = self._next = None

    def _free_segment(self) -> _Segment:
        if self._next is not None and not self._next.lock():
            # An engine is still reading it: one that is late, or one that restarts. It keeps that copy.
            self._next.close()
            self._next = None
        if self._next is None:
            self._next = _Segment()
            self._next.lock()
        return self._next


class OwnSharedMemory:
    """Live weights for one reader in another process of this machine; memory is taken with the first."""

    def __init__(self) -> None:
        self._buffer: SharedMemoryBuffer | None = None

    async def load(
        self, source: WeightSource, load: Callable[[StoredWeights], Awaitable[LoadedWeights]]
    ) -> LoadedWeights:
        """`load` is told where they are, and compares the checksum."""
        self._buffer = self._buffer or SharedMemoryBuffer()
        stored = await asyncio.to_thread(self._buffer.write, source)
        loaded = await load(stored)
        self._buffer.confirm()
        return loaded

    async def close(self) -> None:
        if self._buffer is not None:
            await asyncio.to_thread(self._buffer.close)


class _Segment:
    def __init__(self) -> None:
        self.descriptor = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
        self.capacity = 0
        self._bytes: Bytes = np.empty(0, np.uint8)
        self.bytes(0, 1)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def lock(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def bytes(self, offset: int, num_bytes: int) -> Bytes:
        end = offset + num_bytes
        if end > self.capacity:
            # Pages that are not written take no memory.
            self.capacity = max(end, 2 * self.capacity, 1 << 20)
            os.ftruncate(self.descriptor, self.capacity)
            self._bytes = np.frombuffer(mmap.mmap(self.descriptor, self.capacity), dtype=np.uint8)
        return self._bytes[offset:end]

    def close(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        os.close(self.descriptor)


class _Writer:
    """One set of weights into one segment."""

    def __init__(self, segment: _Segment, pool: ThreadPoolExecutor, bucket_bytes: int) -> None:
        self._segment = segment
        self._pool = pool
        self._bucket_bytes = bucket_bytes
        self._entries: dict[str, TensorEntry] = {}
        self._end = 0

    def write(self, source: WeightSource) -> SharedMemoryWeights:
        checksum = digest_pieces(self._place(source), self._pool, self._bucket_bytes)
        return SharedMemoryWeights(
            path=self._segment.path,
            entries=tuple(self._entries.values()),
            checksum=checksum,
            num_bytes=self._end,
        )

    def _place(self, source: WeightSource) -> Iterator[Piece]:
        """Each tensor with its place in the segment."""
        for name, tensor in source.tensors():
            if name in self._entries:
                raise WeightSyncError(f"{name} was given twice")
            data = tensor_bytes(tensor)
            entry = TensorEntry(name, dtype_name(tensor), tuple(tensor.shape), self._end, len(data))
            self._entries[name] = entry
            self._end += len(data) + -len(data) % ALIGNMENT
            yield from pieces(entry, data, self._segment.bytes(entry.offset, len(data)))


class SharedMemoryWriter:
    def __init__(self, *, bucket_bytes: int = 64 << 20) -> None:
        self._buffer = SharedMemoryBuffer(bucket_bytes=bucket_bytes)

    def write(self, source: WeightSource, model_step: int) -> SharedMemoryWeights:
        return self._buffer.write(source)

    def confirm(self) -> None:
        self._buffer.confirm()

    def close(self) -> None:
        self._buffer.close()
