"""Whether the write-ahead log of a killed run is whole.

SQLite reads the log up to the first frame whose checksum is wrong and takes the rest for the torn end of a write that
was never acknowledged. A flipped bit in the middle would so undo acknowledged transactions in silence. The two can be
told apart: a transaction is on disk before the next one begins, so behind a torn one there is no other.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.replay.table import damaged

HEADER = 32
FRAME_HEADER = 24
MAGIC = 0x377F0682

Sum = tuple[int, int]
Words = npt.NDArray[np.uint32]


class Frame(msgspec.Struct, frozen=True):
    """One page in the log."""

    number: int
    commits: bool
    """Whether it ends a transaction."""
    salts: tuple[int, int]
    """Those of the log's header, unless the frame is from an earlier round through the file."""
    stated: Sum
    content: bytes
    """What its checksum covers."""


def check(ledger: Path) -> None:
    """Raises LedgerError when the log of this database lost a transaction that others were built on."""
    path = ledger.with_name(ledger.name + "-wal")
    try:
        log = path.read_bytes()
    except FileNotFoundError:
        return
    if len(log) <= HEADER:
        return
    magic, _, page_size, _, *rest = struct.unpack(">8I", log[:HEADER])
    order = ">u4" if magic & 1 else "<u4"
    if magic & ~1 != MAGIC or extend((0, 0), log[:24], order) != tuple(rest[2:]):
        raise damaged(path, "its header does not have its checksum")
    salts, running = tuple(rest[:2]), (rest[2], rest[3])
    broken, transaction_ended = None, False
    for frame in _frames(log, page_size):
        if broken is None:
            running = extend(running, frame.content, order)
            if frame.salts == salts and running == frame.stated:
                continue
            broken = frame.number
        if transaction_ended and frame.salts == salts:
            raise damaged(path, f"frame {broken} does not have its checksum, and later transactions stand behind it")
        # One of the salts is enough: the other may be what is damaged.
        if frame.commits and (frame.salts[0] == salts[0] or frame.salts[1] == salts[1]):
            transaction_ended = True


def _frames(log: bytes, page_size: int) -> Iterator[Frame]:
    size = FRAME_HEADER + page_size
    for number, start in enumerate(range(HEADER, len(log) - size + 1, size)):
        _, commit, *rest = struct.unpack(">6I", log[start : start + FRAME_HEADER])
        content = log[start : start + 8] + log[start + FRAME_HEADER : start + size]
        yield Frame(number, bool(commit), (rest[0], rest[1]), (rest[2], rest[3]), content)


def extend(running: Sum, content: bytes, order: str) -> Sum:
    """The log's checksum continued over `content`: for each pair (a, b), s0 += a + s1 and s1 += b + s0, in 32 bits.

    That is linear, so it is one product with coefficients instead of a loop over words.
    """
    words = np.frombuffer(content, order).astype(np.uint32)
    total = []
    for row, (m0, m1) in zip(_coefficients(len(words) // 2), _power(len(words) // 2), strict=True):
        part = int((row * words).sum(dtype=np.uint32))
        total.append((part + m0 * running[0] + m1 * running[1]) & 0xFFFFFFFF)
    return total[0], total[1]


@functools.lru_cache(maxsize=8)
def _powers(pairs: int) -> list[tuple[Sum, Sum]]:
    """The matrix of one pair, ((1, 1), (1, 2)), to the powers 0 to `pairs`, modulo 2**32."""
    powers = [((1, 0), (0, 1))]
    for _ in range(pairs):
        (a, b), (c, d) = powers[-1]
        powers.append((((a + b) % 2**32, (a + 2 * b) % 2**32), ((c + d) % 2**32, (c + 2 * d) % 2**32)))
    return powers


def _power(pairs: int) -> tuple[Sum, Sum]:
    return _powers(pairs)[pairs]


@functools.lru_cache(maxsize=8)
def _coefficients(pairs: int) -> tuple[Words, Words]:
    """What each word adds to the first and to the second sum."""
    rows: list[Words] = []
    for which in range(2):
        row = np.empty(2 * pairs, dtype=np.uint32)
        for index, power in enumerate(reversed(_powers(pairs)[:pairs])):
            m0, m1 = power[which]
            row[2 * index] = (m0 + m1) % 2**32
            row[2 * index + 1] = m1
        rows.append(row)
    return rows[0], rows[1]
