"""A group as bytes and back: msgpack; the prompt once, when it is drawn, the rollouts without it.

Statuses are not part of the bytes: they change without the content (a group expires, is given back) and stand beside
the group's state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.ports import FinishedTurn
from penstock.rollout import (
    NO_TOKENS,
    ROOT,
    WHOLE,
    Failure,
    FinishReason,
    Group,
    Prompt,
    RolloutState,
    Segment,
    Status,
    Tokens,
    Turn,
    Verdict,
)

_LETTERS = {
    Status.INIT: "i",
    Status.COMPLETED: "c",
    Status.ABORTED: "a",
    Status.EXPIRED: "e",
    Status.FAILED: "f",
    Status.FILTERED: "x",
    Status.MAX_TRIES: "m",
}
_STATUSES = {letter: status for status, letter in _LETTERS.items()}

Steps = tuple[tuple[int, int], ...]


class StoredSegment(msgspec.Struct, array_like=True, gc=False):
    ids: bytes
    logprobs: bytes
    mask: bytes
    steps: Steps
    parent: int
    start: int

    @classmethod
    def of(cls, segment: Segment) -> StoredSegment:
        tokens = segment.tokens
        return cls(tokens.ids, tokens.logprobs, tokens.mask, tokens.steps, segment.parent, segment.start)

    def segment(self) -> Segment:
        return Segment(Tokens(self.ids, self.logprobs, self.mask, self.steps), self.parent, self.start)


class StoredRollout(msgspec.Struct, array_like=True, gc=False):
    """One rollout without prompt, group and status. New fields go to the end, with a default.

    The tokens of an answer that never branched are its own fields; `segments` are those of any other.
    """

    rollout_id: str
    ids: bytes
    logprobs: bytes
    mask: bytes
    steps: Steps
    response_text: str
    turns: tuple[Turn, ...]
    finish_reason: FinishReason | None
    reward: Verdict | None
    num_tries: int
    infrastructure_failures: int
    data_failures: int
    group_generate_time_s: float
    error: Failure | None
    segments: tuple[StoredSegment, ...] = ()
    played: bytes = b""

    def all_segments(self) -> tuple[Segment, ...]:
        if self.segments:
            return tuple([segment.segment() for segment in self.segments])
        return (Segment(Tokens(self.ids, self.logprobs, self.mask, self.steps)),) if self.mask else ()

    def rollout(self, prompt: Prompt, status: Status, *, task_name: str, group_id: str, draw: int) -> RolloutState:
        return RolloutState(
            prompt=prompt,
            task_name=task_name,
            group_id=group_id,
            rollout_id=self.rollout_id,
            draw=draw,
            status=status,
            segments=self.all_segments(),
            response_text=self.response_text,
            turns=self.turns,
            finish_reason=self.finish_reason,
            reward=self.reward,
            num_tries=self.num_tries,
            infrastructure_failures=self.infrastructure_failures,
            data_failures=self.data_failures,
            group_generate_time_s=self.group_generate_time_s,
            error=self.error,
            played=self.played,
        )


class StoredDraw(msgspec.Struct, array_like=True, gc=False):
    """A group as it is drawn: what is asked, and by which names."""

    prompt: Prompt
    rollout_ids: list[str]


class StoredTurn(msgspec.Struct, array_like=True, gc=False):
    """A finished turn with its tokens. New fields go to the end, with a default."""

    turn: Turn
    ids: bytes
    logprobs: bytes
    mask: bytes
    steps: Steps
    parent: int = ROOT
    start: int = WHOLE

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.ids, self.logprobs, self.mask, self.steps)


_encoder = msgspec.msgpack.Encoder()
_encode = _encoder.encode
_draw_decoder = msgspec.msgpack.Decoder(StoredDraw)
rollouts_decoder = msgspec.msgpack.Decoder(list[StoredRollout])
decode_turn = msgspec.msgpack.Decoder(StoredTurn).decode


def encode_draw(group: Group) -> bytes:
    return _encode(StoredDraw(group[0].prompt, [rollout.rollout_id for rollout in group]))


def encode_turn(finished: FinishedTurn) -> bytes:
    tokens = finished.tokens
    return _encode(
        StoredTurn(
            finished.turn, tokens.ids, tokens.logprobs, tokens.mask, tokens.steps, finished.parent, finished.start
        )
    )


class RolloutsEncoder:
    """Encodes the rollouts of groups, for one thread: a buffer that is used again need not grow for each of them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def encode(self, group: Group) -> bytes:
        _encoder.encode_into([_stored(rollout) for rollout in group], self._buffer)
        return bytes(self._buffer)


def _stored(rollout: RolloutState) -> tuple[Any, ...]:
    """The fields of a `StoredRollout`, in their order. A tuple has the same bytes and takes a third of the time."""
    segments = rollout.segments
    tokens = NO_TOKENS
    branched: tuple[StoredSegment, ...] = ()
    if len(segments) == 1 and segments[0].start == WHOLE and segments[0].tokens.mask:  # nearly all are
        tokens = segments[0].tokens
    elif segments:
        branched = tuple([StoredSegment.of(segment) for segment in segments])
    return (
        rollout.rollout_id,
        tokens.ids,
        tokens.logprobs,
        tokens.mask,
        tokens.steps,
        rollout.response_text,
        rollout.turns,
        rollout.finish_reason,
        rollout.reward,
        rollout.num_tries,
        rollout.infrastructure_failures,
        rollout.data_failures,
        rollout.group_generate_time_s,
        rollout.error,
        branched,
        rollout.played,
    )


def encode_rollouts(group: Group) -> bytes:
    return RolloutsEncoder().encode(group)


class StoredGroup(msgspec.Struct, frozen=True, gc=False):
    """A group's bytes; decoded when it is needed, because a restart gives back more groups than the next step."""

    task: str
    group_id: str
    draw: int
    drawn: bytes
    rollouts: bytes | None
    """None when it was drawn and nothing more is known."""

    def decode(self, statuses: Sequence[Status]) -> Group:
        """Raises ValueError when bytes and statuses do not fit."""
        drawn = _draw_decoder.decode(self.drawn)
        if self.rollouts is None:
            return [
                RolloutState(prompt=drawn.prompt, rollout_id=rollout_id, status=status, **self._identity())
                for rollout_id, status in zip(drawn.rollout_ids, statuses, strict=True)
            ]
        return [
            stored.rollout(drawn.prompt, status, **self._identity())
            for stored, status in zip(rollouts_decoder.decode(self.rollouts), statuses, strict=True)
        ]

    def _identity(self) -> dict[str, Any]:
        return {"task_name": self.task, "group_id": self.group_id, "draw": self.draw}


@functools.lru_cache(maxsize=4096)
def encode_statuses(statuses: tuple[Status, ...]) -> str:
    return "".join([_LETTERS[status] for status in statuses])


@functools.lru_cache(maxsize=4096)
def decode_statuses(letters: str) -> tuple[Status, ...]:
    return tuple([_STATUSES[letter] for letter in letters])
