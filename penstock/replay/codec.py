"""A group as bytes and back: msgpack; the prompt once, when it is drawn, the rollouts without it.

Statuses are not part of the bytes: they change without the content (a group expires, is given back) and stand beside
the group's state.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.rollout import Failure, FinishReason, Group, Prompt, RolloutState, Status, Tokens, Turn, Verdict, linear

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

Column = int | float | str | None


class StoredRollout(msgspec.Struct, array_like=True, gc=False):
    """One rollout without prompt, group and status. New fields go to the end, with a default."""

    rollout_id: str
    ids: bytes
    logprobs: bytes
    mask: bytes
    steps: tuple[tuple[int, int], ...]
    response_text: str
    turns: tuple[Turn, ...]
    finish_reason: FinishReason | None
    reward: Verdict | None
    num_tries: int
    infrastructure_failures: int
    data_failures: int
    group_generate_time_s: float
    error: Failure | None


class StoredDraw(msgspec.Struct, array_like=True, gc=False):
    """A group as it is drawn: what is asked, and by which names."""

    prompt: Prompt
    rollout_ids: list[str]


_encoder = msgspec.msgpack.Encoder()
_encode = _encoder.encode
_draw_decoder = msgspec.msgpack.Decoder(StoredDraw)
_rollouts_decoder = msgspec.msgpack.Decoder(list[StoredRollout])


def encode_draw(group: Group) -> bytes:
    return _encode(StoredDraw(group[0].prompt, [rollout.rollout_id for rollout in group]))


class RolloutsEncoder:
    """Encodes the rollouts of groups, for one thread: a buffer that is used again need not grow for each of them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def encode(self, group: Group) -> bytes:
        _encoder.encode_into(
            [
                StoredRollout(
                    rollout.rollout_id,
                    (tokens := rollout.response).ids,
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
                )
                for rollout in group
            ],
            self._buffer,
        )
        return bytes(self._buffer)


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
            RolloutState(
                prompt=drawn.prompt,
                rollout_id=stored.rollout_id,
                status=status,
                segments=linear(Tokens(stored.ids, stored.logprobs, stored.mask, stored.steps)),
                response_text=stored.response_text,
                turns=stored.turns,
                finish_reason=stored.finish_reason,
                reward=stored.reward,
                num_tries=stored.num_tries,
                infrastructure_failures=stored.infrastructure_failures,
                data_failures=stored.data_failures,
                group_generate_time_s=stored.group_generate_time_s,
                error=stored.error,
                **self._identity(),
            )
            for stored, status in zip(_rollouts_decoder.decode(self.rollouts), statuses, strict=True)
        ]

    def _identity(self) -> dict[str, Any]:
        return {"task_name": self.task, "group_id": self.group_id, "draw": self.draw}


@functools.lru_cache(maxsize=4096)
def encode_statuses(statuses: tuple[Status, ...]) -> str:
    return "".join([_LETTERS[status] for status in statuses])


@functools.lru_cache(maxsize=4096)
def decode_statuses(letters: str) -> tuple[Status, ...]:
    return tuple([_STATUSES[letter] for letter in letters])


class ModelSteps(NamedTuple):
    """Which weights made a group's tokens. The first two decide when the group expires."""

    oldest: int | None = None
    oldest_newest: int | None = None
    """The lowest of the rollouts' newest."""
    newest: int | None = None


def model_steps(group: Group) -> ModelSteps:
    different = {rollout.steps for rollout in group}
    made = {step for steps in different for step, _ in steps}
    if not made:
        return ModelSteps()
    if len(made) == 1:  # nearly always
        (step,) = made
        return ModelSteps(step, step, step)
    newest = [max(steps)[0] for steps in different if steps]
    return ModelSteps(min(made), min(newest), max(made))


def checksum(*columns: Column) -> int:
    """CRC-32 over a row's columns."""
    return zlib.crc32(_encode(columns))


def seal(row: tuple[Column, ...]) -> tuple[Column, ...]:
    """The row with its checksum."""
    return (*row, zlib.crc32(_encode(row)))


def content_checksum(content: bytes, *columns: Column) -> int:
    crc = zlib.crc32(_encode(columns))
    # In pieces: over more than 5 KB zlib lets other threads run, and to get its turn back costs more than the sum.
    view = memoryview(content)
    for start in range(0, len(content), 4096):
        crc = zlib.crc32(view[start : start + 4096], crc)
    return crc
