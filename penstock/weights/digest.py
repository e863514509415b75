"""A checksum as fast as reading: hashing every byte with a cryptographic hash would take longer than the transfer.

Every 64 KB become one sum of their 64-bit words, modulo 2**64; the sums go through blake2b, in order, with the
tensor's name, dtype and shape. A changed bit, a stale or a missing page and swapped tensors change the result. It
guards against accidents, not against an attacker.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

CHUNK = 8 << 20
"""One job of a thread: large enough that handing it over costs nothing."""
PIECE = 1 << 20
"""Small enough to stay in a core's cache between being copied and being summed."""
_ROW = 64 << 10
THREADS = min(4, os.cpu_count() or 1)


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a transfer."""

    name: str
    dtype: str
    """As torch names it: `float32`, `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Digest:
    """Collects the sums of tensors in order. Both ends must feed it the same tensors in the same order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def begin(self, entry: TensorEntry) -> None:
        self._hash.update(msgspec.msgpack.encode((entry.name, entry.dtype, entry.shape, entry.num_bytes)))

    def add(self, sums: bytes) -> None:
        self._hash.update(sums)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def chunk_sums(chunk: Bytes) -> bytes:
    return b"".join(_piece_sums(chunk[start : start + PIECE]) for start in range(0, len(chunk), PIECE))


def copy_chunk(target: Bytes, source: Bytes) -> bytes:
    """Copy, and sum what arrived while it is still in the cache."""
    sums = []
    for start in range(0, len(source), PIECE):
        arrived = target[start : start + PIECE]
        np.copyto(arrived, source[start : start + PIECE])
        sums.append(_piece_sums(arrived))
    return b"".join(sums)


def _piece_sums(piece: Bytes) -> bytes:
    whole = len(piece) - len(piece) % _ROW
    sums: npt.NDArray[np.uint64] = np.add.reduce(piece[:whole].view(np.uint64).reshape(-1, _ROW // 8), axis=1)
    words = len(piece) - len(piece) % 8
    rest: np.uint64 = np.add.reduce(piece[whole:words].view(np.uint64))
    packed: bytes = sums.tobytes() + rest.tobytes() + piece[words:].tobytes()
    return packed


def chunks(num_bytes: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, num_bytes)) for start in range(0, num_bytes, CHUNK))


def checksum(tensors: Iterable[tuple[TensorEntry, Bytes]], pool: ThreadPoolExecutor) -> str:
    """Of tensors that lie in memory already."""
    digest = Digest()
    jobs = [
        (entry, [pool.submit(chunk_sums, data[chunk]) for chunk in chunks(entry.num_bytes)]) for entry, data in tensors
    ]
    for entry, sums in jobs:
        digest.begin(entry)
        for job in sums:
            digest.add(job.result())
    return digest.hexdigest()


def with_pool(work: Callable[[ThreadPoolExecutor], T]) -> T:
    with ThreadPoolExecutor(THREADS, thread_name_prefix="penstock-weights") as pool:
        return work(pool)


def tensor_bytes(tensor: Any) -> Bytes:
    """The bytes of a tensor, without a copy where it lies contiguous in this machine's memory."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    view: Bytes = flat.view(torch.uint8).numpy()
    return view


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
