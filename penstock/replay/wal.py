"""Whether the write-ahead log of a killed run is whole.

SQLite reads the log up to the first frame whose checksum is wrong and takes the rest for the torn end of a write that
was never acknowledged. A flipped bit in the middle would so undo acknowledged transactions in silence. The two can be
told apart: a transaction is on disk before the next one begins, so behind a torn one there is no other.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import LedgerError

_HEADER = 32
_FRAME_HEADER = 24
_MAGIC = 0x377F0682
_MASK = 0xFFFFFFFF

Words = npt.NDArray[np.uint32]


class _Sum(NamedTuple):
    first: int
    second: int


def check(ledger: Path) -> None:
    """Raises LedgerError when the log of this database lost a transaction that others were built on."""
    path = ledger.with_name(ledger.name + "-wal")
    try:
        log = path.read_bytes()
    except FileNotFoundError:
        return
    if len(log) < _HEADER + _FRAME_HEADER:
        return
    magic, _, page_size, _, *salts_and_sum = struct.unpack(">8I", log[:_HEADER])
    salts, stated = tuple(salts_and_sum[:2]), _Sum(*salts_and_sum[2:])
    if magic & ~1 != _MAGIC or page_size & (page_size - 1) or not 512 <= page_size <= 65536:
        raise _damaged(path, "its header is not that of a log")
    order = ">u4" if magic & 1 else "<u4"
    if _add(_Sum(0, 0), np.frombuffer(log[:24], order)) != stated:
        raise _damaged(path, "its header does not have its checksum")
    running, broken_at, ended = stated, -1, False
    for number, start in enumerate(range(_HEADER, len(log) - _FRAME_HEADER - page_size + 1, _FRAME_HEADER + page_size)):
        _, commit, *rest = struct.unpack(">6I", log[start : start + _FRAME_HEADER])
        if tuple(rest[:2]) != salts:
            # Of an earlier round through the file, or damaged itself; a later frame of this round tells.
            broken_at = number if broken_at < 0 else broken_at
            continue
        if broken_at >= 0:
            if ended or number > broken_at + 1 and _ends_before(log, start, broken_at, page_size, salts):
                raise _damaged(path, f"frame {broken_at} does not have its checksum, and later transactions follow it")
            ended = bool(commit)
            continue
        body = log[start + _FRAME_HEADER : start + _FRAME_HEADER + page_size]
        words = np.concatenate([np.frombuffer(log[start : start + 8], order), np.frombuffer(body, order)])
        running = _add(running, words)
        if running != _Sum(*rest[2:]):
            broken_at, ended = number, bool(commit)
