"""What a rollout did while it was played, and when: a few numbers, kept with it for people who look at a run.

A span is a stage, the wall clock's time at which it began, and its seconds. Spans are packed, 13 bytes each, because
every rollout has some; those too short to see are left out. Of a rollout with very many calls the first ones are told
apart, and what came after them is one span without a name of its own.
"""

from __future__ import annotations

import struct
import time
from typing import NamedTuple

QUEUED, GENERATED, AT_TOOL, JUDGED, MORE = range(5)
WORDS = ("queue", "generate", "tool", "judge", "more")
"""`queue`: it waited for a place at an engine. `more`: generation and tools, no longer told apart."""
SHORTEST_S = 0.0005
MAX_SPANS = 64

_SPAN = struct.Struct("<Bdf")


class PlayedSpan(NamedTuple):
    stage: str
    began: float
    """The wall clock's, in seconds since 1970."""
    seconds: float


def with_span(played: bytes, stage: int, seconds: float, *, ago_s: float = 0.0) -> bytes:
    """With one span more, which ended `ago_s` seconds ago."""
    if seconds < SHORTEST_S:
        return played
    began = time.time() - ago_s - seconds
    if len(played) >= MAX_SPANS * _SPAN.size:
        last, last_began, _ = _SPAN.unpack_from(played, len(played) - _SPAN.size)
        if last == MORE:
            played, began, seconds = played[: -_SPAN.size], last_began, began + seconds - last_began
        stage = MORE
    return played + pack_span(stage, began, seconds)


def pack_span(stage: int, began: float, seconds: float) -> bytes:
    return _SPAN.pack(stage, began, seconds)


def read_played(played: bytes) -> list[PlayedSpan]:
    return [PlayedSpan(WORDS[stage], began, seconds) for stage, began, seconds in _SPAN.iter_unpack(played)]
