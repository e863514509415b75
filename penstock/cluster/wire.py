"""What goes between processes: groups and errors as bytes, calls and their answers.

A group travels as the ledger writes it, its prompt once and as it is: what a user put into it keeps its type. What an
actor played comes back without the prompt, which the asker has. An error travels as itself; one whose class the other
side does not know, as a RuntimeError with its name and words.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from typing import Any

from penstock.errors import DataFailure
from penstock.replay.codec import decode_statuses, encode_rollouts, encode_statuses, rollouts_decoder
from penstock.rollout import Group, Prompt, RolloutState

VALUE, RAISED, MISSING = b"=", b"!", b"?"
"""The first byte of an answer: what was returned, what was raised, or that the actor does not have this part."""


class PackedGroup:
    """A group that is unpacked by unpickling it: what arrives is a plain group."""

    __slots__ = ("group",)

    def __init__(self, group: Sequence[RolloutState]) -> None:
        self.group = group

    def __reduce__(self) -> tuple[Any, ...]:
        group = list(self.group)
        first = group[0]
        if any(rollout.prompt is not first.prompt for rollout in group):
            return list, (group,)  # not as the sampler makes them
        prompts = first.prompt, first.task_name, first.group_id, first.draw
        return _unpacked, (*prompts, *pack_rollouts(group))


def _unpacked(prompt: Prompt, task_name: str, group_id: str, draw: int, rollouts: bytes, letters: str) -> Group:
    return [
        stored.rollout(prompt, status, task_name=task_name, group_id=group_id, draw=draw)
        for stored, status in zip(rollouts_decoder.decode(rollouts), decode_statuses(letters), strict=True)
    ]


def pack_rollouts(group: Group) -> tuple[bytes, str]:
    """Without prompt and group."""
    return encode_rollouts(group), encode_statuses(tuple([rollout.status for rollout in group]))


def unpack_rollouts(packed: tuple[bytes, str], asked: Group) -> Group:
    """What became of `asked`. Raises DataFailure when it is not of that group."""
    known = {rollout.rollout_id: rollout for rollout in asked}
    rollouts, letters = packed
    group = []
    for stored, status in zip(rollouts_decoder.decode(rollouts), decode_statuses(letters), strict=True):
        before = known.get(stored.rollout_id)
        if before is None:
            raise DataFailure(f"the agent loop answered with rollout {stored.rollout_id!r}, which it was not given")
        group.append(
            stored.rollout(
                before.prompt, status, task_name=before.task_name, group_id=before.group_id, draw=before.draw
            )
        )
    return group


def pack(value: Any) -> bytes:
    """Each call by itself, and not its list by Ray: one that cannot be made again there must not lose the others."""
    return pickle.dumps(value, protocol=5)


def unpack(packed: bytes | memoryview) -> Any:
    """Of what another process of this run packed."""
    return pickle.loads(packed)


def answer_with(value: Any) -> bytes:
    return VALUE + pack(value)


def answer_raised(error: Exception) -> bytes:
    """Checked here: what cannot be made again from its bytes would lose its words on the other side."""
    itself = b""
    with contextlib.suppress(Exception):
        packed = pack(error)
        if type(unpack(packed)) is type(error):
            itself = packed
    return RAISED + pack((itself, type(error).__name__, str(error)))


def read_answer(answer: bytes) -> Any:
    """What was returned. Raises what was raised."""
    if answer[:1] == VALUE:
        return unpack(memoryview(answer)[1:])
    itself, name, words = unpack(memoryview(answer)[1:])
    raise _error(itself, name, words)


def _error(itself: bytes, name: str, words: str) -> Exception:
    with contextlib.suppress(Exception):
        error = unpack(itself)
        if isinstance(error, Exception):
            return error
    return RuntimeError(f"{name}: {words}")
