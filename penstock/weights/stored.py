"""What a channel tells an engine: where the bytes are, and their checksum. Small records that travel as msgpack.

    with stored.receive() as weights:      in the engine's process
        load(weights)                      the tensors are views; they are valid inside the block, or until given back

`receive` reads every byte and compares the checksum before it hands out the first tensor.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from safetensors import SafetensorError, safe_open

from penstock.errors import WeightSyncError
from penstock.weights.digest import Bytes, TensorEntry, checksum, dtype_name, tensor_bytes, with_pool

if TYPE_CHECKING:
    # Who only hands the records on, as the controller in its actor does, needs no torch.
    import torch


class ReceivedWeights:
    """A `WeightSource` over bytes that were checked."""

    def __init__(self, tensors: dict[str, torch.Tensor], checksum: str) -> None:
        self._tensors = tensors
        self.checksum = checksum

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


class LentMemory(ReceivedWeights):
    """Memory of this process that was checked, and that nobody writes to again."""

    def keep(self) -> Callable[[], None]:
        return lambda: None


class LentSharedMemory(ReceivedWeights):
    """Shared memory that was checked. Its owner writes the next weights elsewhere while it is read or kept."""

    def __init__(self, tensors: dict[str, torch.Tensor], checksum: str, descriptor: int) -> None:
        super().__init__(tensors, checksum)
        self._descriptor = descriptor
        self._users = 1
        self._counting = threading.Lock()

    def keep(self) -> Callable[[], None]:
        """Use the tensors in place until the returned function is called, once.

        Raises WeightSyncError when nobody has them any more: the owner may be writing others there.
        """
        with self._counting:
            if not self._users:
                raise WeightSyncError("the weights were given back before they were loaded; the old ones are kept")
            self._users += 1
        return self.give_back

    def give_back(self) -> None:
        with self._counting:
            self._users -= 1
            if not self._users:
                _unlock(self._descriptor)


class SharedMemoryWeights(msgspec.Struct, frozen=True, kw_only=True, tag="shared_memory"):
    """Weights in memory that another process of this machine owns, reached through its file descriptor.

    The memory has no name in any directory: it is gone with the last process that uses it, however that ends.
    """

    path: str
    """`/proc/<process>/fd/<descriptor>`."""
    entries: tuple[TensorEntry, ...]
    checksum: str
    num_bytes: int
    """Of the memory, with what lies between two tensors."""

    @property
    def payload(self) -> int:
        """Bytes of weights."""
        return sum(entry.num_bytes for entry in self.entries)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """For readers that use each tensor before they ask for the next."""
        with self.receive() as received:
            yield from received.tensors()

    @contextlib.contextmanager
    def receive(self) -> Iterator[ReceivedWeights]:
        """Holds a shared lock inside the block: the owner writes the next weights elsewhere meanwhile.

        Raises WeightSyncError when the memory is gone or holds other weights by now.
        """
        descriptor = self._open()
        try:
            tensors = views(self._memory(descriptor), self.entries)
            found = with_pool(lambda pool: checksum(_bytes_of(tensors, self.entries), pool))
            compare(found, self.checksum, self.path)
        except BaseException:
            _unlock(descriptor)
            raise
        lent = LentSharedMemory(tensors, found, descriptor)
        try:
            yield lent
        finally:
            lent.give_back()

    @contextlib.contextmanager
    def held(self) -> Iterator[torch.Tensor]:
        """The memory as it is, which nobody changes inside the block; not compared with the checksum."""
        descriptor = self._open()
        try:
            yield self._memory(descriptor)
        finally:
            _unlock(descriptor)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WeightSyncError(f"the weights in {self.path} are gone: {error}") from error

    def _memory(self, descriptor: int) -> torch.Tensor:
        import torch

        fcntl.flock(descriptor, fcntl.LOCK_SH)
        memory = _mapped(descriptor, self.path)
        if len(memory) < self.num_bytes:
            raise WeightSyncError(f"{self.path} has {len(memory)} bytes; the weights have {self.num_bytes}")
        # One storage for all: neighbours in memory can be seen as one tensor.
        return torch.frombuffer(memory, dtype=torch.uint8)[: self.num_bytes]


class DiskWeights(msgspec.Struct, frozen=True, kw_only=True, tag="disk"):
    """Weights in a directory of safetensors files that does not change any more."""

    path: str
    files: tuple[str, ...]
    checksum: str
    num_bytes: int

    @property
    def payload(self) -> int:
        return self.num_bytes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self.receive() as received:
            yield from received.tensors()

    @contextlib.contextmanager
    def receive(self) -> Iterator[ReceivedWeights]:
        """Raises WeightSyncError when a file is missing, unreadable, or not what was written."""
        try:
            read = [_read_file(Path(self.path) / name) for name in self.files]
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"the weights in {self.path} cannot be read: {error}") from error
        found = joined_checksum(with_pool(lambda pool: [tensors_checksum(tensors, pool) for tensors in read]))
        compare(found, self.checksum, self.path)
        yield ReceivedWeights({name: tensor for tensors in read for name, tensor in tensors.items()}, found)


class BroadcastWeights(msgspec.Struct, frozen=True, kw_only=True, tag="broadcast"):
    """Weights in shared memory of the sender's machine, from which it sends them to others: see `broadcast`."""

    shared: SharedMemoryWeights
    machine: str | None
    """Where an engine reads the shared memory itself. None: nowhere, every engine is sent them."""
    address: str
    """Of the sender, where engines ask for them."""
    port: int
    backend: Literal["gloo", "nccl"] = "gloo"
    bucket_bytes: int = 64 << 20
    timeout_s: float = 300.0
    connect_s: float = 20.0
    """For those who receive together to find each other, and for one bucket to reach all of them."""

    @property
    def checksum(self) -> str:
        return self.shared.checksum

    @property
    def num_bytes(self) -> int:
        return self.shared.num_bytes

    @property
    def payload(self) -> int:
        return self.shared.payload

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self.receive() as received:
            yield from received.tensors()

    @contextlib.contextmanager
    def receive(self) -> Iterator[ReceivedWeights]:
        """Raises WeightSyncError when they did not arrive in time, or are not what was sent."""
        from penstock.weights import broadcast

        if self.machine is not None and self.machine == broadcast.machine_id():
            with self.shared.receive() as received:
                yield received
        else:
            yield broadcast.receive(self)


StoredWeights = SharedMemoryWeights | DiskWeights | BroadcastWeights
"""Weights that can be read again, later and in another process."""


def tensors_checksum(tensors: dict[str, torch.Tensor], pool: ThreadPoolExecutor) -> str:
    """Independent of the order in which files list their tensors."""
    entries = [
        TensorEntry(name, dtype_name(tensor), tuple(tensor.shape), 0, tensor.numel() * tensor.element_size())
        for name, tensor in sorted(tensors.items())
    ]
    return checksum(_bytes_of(tensors, entries), pool)


def joined_checksum(checksums: list[str]) -> str:
    return hashlib.blake2b("".join(checksums).encode(), digest_size=16).hexdigest()


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is not a mapping


def _bytes_of(
    tensors: dict[str, torch.Tensor], entries: tuple[TensorEntry, ...] | list[TensorEntry]
) -> Iterator[tuple[TensorEntry, Bytes]]:
    for entry in entries:
        yield entry, tensor_bytes(tensors[entry.name])


def compare(found: str, expected: str, path: str) -> None:
    if found != expected:
        raise WeightSyncError(
            f"the weights in {path} have checksum {found}, sent was {expected}; the old ones are kept"
        )


def _unlock(descriptor: int) -> None:
    # Not by closing alone: the mapping that is kept holds the same open file.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def views(memory: torch.Tensor, entries: tuple[TensorEntry, ...]) -> dict[str, torch.Tensor]:
    return {entry.name: _view(memory, entry) for entry in entries}


def _view(memory: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    import torch

    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"{entry.name} has dtype {entry.dtype}, which this torch does not know")
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    return memory[entry.offset : entry.offset + entry.num_bytes].view(dtype).view(entry.shape)


_mappings: dict[tuple[int, int, int], mmap.mmap] = {}
"""Mapping memory costs a fault per page. A channel writes to two segments in turn, so its reader keeps two mapped."""


def _mapped(descriptor: int, path: str) -> mmap.mmap:
    status = os.fstat(descriptor)
    key = (status.st_dev, status.st_ino, status.st_size)
    if key in _mappings:
        return _mappings[key]
    try:
        memory = mmap.mmap(descriptor, status.st_size)
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"the weights in {path} cannot be mapped: {error}") from error
    while len(_mappings) > 1:
        del _mappings[next(iter(_mappings))]
    _mappings[key] = memory
    return memory
