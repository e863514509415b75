"""A checksum as fast as reading: hashing every byte with a cryptographic hash would take longer than the transfer.

Every 64 KB become one sum of their 64-bit words, modulo 2**64; the sums go through blake2b, in order, with the
tensor's name, dtype and shape. A changed bit, a stale or a missing page and swapped tensors change the result. It
guards against accidents, not against an attacker.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

CHUNK = 8 << 20
"""One job of a thread, be it a part of a tensor or many small ones: handing it over must cost nothing."""
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
    whole = len(chunk) - len(chunk) % _ROW
    return _row_sums(chunk[:whole]) + _rest_sum(chunk[whole:])


def copy_chunk(target: Bytes, source: Bytes) -> bytes:
    """Copy, and sum what arrived while it is still in the cache; the same sums as `chunk_sums`."""
    sums = []
    whole = len(source) - len(source) % _ROW
    for start in range(0, whole, PIECE):
        piece = slice(start, min(start + PIECE, whole))
        np.copyto(target[piece], source[piece])
        sums.append(_row_sums(target[piece]))
    np.copyto(target[whole:], source[whole:])
    return b"".join(sums) + _rest_sum(target[whole:])


def _row_sums(rows: Bytes) -> bytes:
    sums: npt.NDArray[np.uint64] = np.add.reduce(rows.view(np.uint64).reshape(-1, _ROW // 8), axis=1)
    return sums.tobytes()


def _rest_sum(rest: Bytes) -> bytes:
    words = len(rest) - len(rest) % 8
    summed: np.uint64 = np.add.reduce(rest[:words].view(np.uint64))
    return summed.tobytes() + rest[words:].tobytes()


class Piece(NamedTuple):
    """A tensor, or a part of one that is large."""

    entry: TensorEntry
    start: int
    data: Bytes
    target: Bytes | None = None
    """Where it is to be copied."""

    def take(self) -> bytes:
        """Copy if that is asked, and return the sums."""
        return chunk_sums(self.data) if self.target is None else copy_chunk(self.target, self.data)


def pieces(entry: TensorEntry, data: Bytes, target: Bytes | None = None) -> Iterator[Piece]:
    for start in range(0, len(data) or 1, CHUNK):
        part = slice(start, start + CHUNK)
        yield Piece(entry, start, data[part], None if target is None else target[part])


def digest_pieces(all_pieces: Iterable[Piece], pool: ThreadPoolExecutor, max_bytes_under_way: int | None = None) -> str:
    """Take the pieces in the threads of `pool`, at most so many bytes ahead of the digest; returns the checksum."""
    digest = Digest()
    under_way: deque[tuple[list[Piece], Future[list[bytes]]]] = deque()

    def finish_first() -> int:
        job, sums = under_way.popleft()
        for piece, found in zip(job, sums.result(), strict=True):
            if piece.start == 0:
                digest.begin(piece.entry)
            digest.add(found)
        return sum(len(piece.data) for piece in job)

    num_bytes = 0
    for job in _jobs(all_pieces):
        under_way.append((job, pool.submit(_take_all, job)))
        num_bytes += sum(len(piece.data) for piece in job)
        while max_bytes_under_way is not None and num_bytes > max_bytes_under_way:
            num_bytes -= finish_first()
    while under_way:
        finish_first()
    return digest.hexdigest()


def _jobs(all_pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    job: list[Piece] = []
    for piece in all_pieces:
        job.append(piece)
        if sum(len(piece.data) for piece in job) >= CHUNK // 2:
            yield job
            job = []
    if job:
        yield job


def _take_all(job: list[Piece]) -> list[bytes]:
    return [piece.take() for piece in job]


def checksum(tensors: Iterable[tuple[TensorEntry, Bytes]], pool: ThreadPoolExecutor) -> str:
    """Of tensors that lie in memory already."""
    return digest_pieces((piece for entry, data in tensors for piece in pieces(entry, data)), pool)


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
