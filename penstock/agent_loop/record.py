"""Record: what one rollout has on record, read back call by call when it is played again, and written as calls end.

Each segment has its own line of turns, which are read back in the order in which they were made. A call of another kind
than the one on record is refused, so that a tool's text is never taken for the model's. Nothing here waits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

from penstock.errors import DataFailure
from penstock.rollout import (
    NO_TOKENS,
    FailureReason,
    FinishReason,
    RolloutState,
    Segment,
    Tokens,
    Turn,
    unpack_ids,
)

GENERATE = "generate"
TOOL = "tool"
MESSAGE = "message"
"""What somebody else said, already encoded: a user, a client, a template."""


class Record:
    def __init__(self, rollout: RolloutState) -> None:
        self.rollout = rollout
        self._done: Counter[int] = Counter()
        """Calls of this playing that were answered, by segment."""

    # Read back.

    def tokens(self, segment: int) -> Tokens:
        segments = self.rollout.segments
        return segments[segment].tokens if segments else NO_TOKENS

    def position(self, segment: int) -> int:
        """How many tokens of a segment the calls of this playing have made, or read back."""
        mine = [turn for turn in self.rollout.turns if turn.segment == segment]
        return sum([turn.num_tokens for turn in mine[: self._done[segment]]])

    def last_id(self, segment: int) -> int | None:
        """The last token of a segment that the calls of this playing have made, or read back."""
        end = self.position(segment)
        return int(unpack_ids(self.tokens(segment).ids)[end - 1]) if end else None

    def ahead(self, segment: int) -> bytes | None:
        """What a segment has on record before the next answer that a call reads back; None when nothing is left."""
        mine = [turn for turn in self.rollout.turns if turn.segment == segment][self._done[segment] :]
        if not mine:
            return None
        said = sum(turn.num_tokens for turn in itertools.takewhile(lambda turn: turn.kind != GENERATE, mine))
        begun = self.position(segment)
        return self.tokens(segment).ids[4 * begun : 4 * (begun + said)]

    def history(self, segment: int) -> list[dict[str, Any]]:
        """What this playing made or read back of a segment, as messages. Text of a tool stands inside the answer."""
        history: list[dict[str, Any]] = [*map(dict, self.rollout.messages)]
        mine = [turn for turn in self.rollout.turns if turn.segment == segment]
        for turn in mine[: self._done[segment]]:
            if turn.kind == MESSAGE:
                history.append({"role": turn.name or "user", "content": turn.text})
            elif history and history[-1]["role"] == "assistant":
                history[-1]["content"] += turn.text
            else:
                history.append({"role": "assistant", "content": turn.text})
        return history

    def next_turn(self, segment: int, kind: str, name: str = "") -> Turn | None:
        """The turn that answers the next call on this segment; None when it is not on record."""
        turns = self.rollout.turns
        mine = turns if len(self.rollout.segments) <= 1 else [turn for turn in turns if turn.segment == segment]
        place = self._done[segment]
        if place >= len(mine):
            return None
        turn = mine[place]
        if turn.kind != kind:
            raise self.mismatch(f"turn {place} is on record as {turn.kind!r}, and now {kind!r} is called")
        if name and turn.name and name != turn.name:
            raise self.mismatch(f"turn {place} is on record as tool {turn.name!r}, and now {name!r} is called")
        return turn

    def read_back(self, segment: int) -> None:
        """The next call on this segment was answered with what is on record."""
        self._done[segment] += 1

    def read_calls(self, segment: int, names: Sequence[str]) -> dict[int, Turn]:
        """Of tools that are called at once: those that are on record, by their numbers."""
        found: dict[int, Turn] = {}
        for _ in names:
            turn = self.next_turn(segment, TOOL)
            if turn is None:
                break
            if turn.call >= len(names) or turn.name != names[turn.call] or turn.call in found:
                raise self.mismatch(f"call {turn.call} of {turn.name!r} is on record and is not made now")
            found[turn.call] = turn
            self.read_back(segment)
        return found

    def read_tokens(self, segment: int, turn: Turn, packed: bytes) -> None:
        """The next call says `packed`, which must be what this turn of the record says. Raises DataFailure."""
        begun = 4 * self.position(segment)
        if self.tokens(segment).ids[begun : begun + 4 * turn.num_tokens] != packed:
            raise self.mismatch(f"turn {self._done[segment]} has other tokens on record")
        self.read_back(segment)

    def mismatch(self, what: str) -> DataFailure:
        return DataFailure(
            f"rollout {self.rollout.rollout_id} was played again in another way: {what}; it starts again",
            reason=FailureReason.RECORD_MISMATCH,
        )

    # Written.

    def set_tokens(self, segment: int, tokens: Tokens) -> None:
        segments = self.rollout.segments
        if not segments:
            self.rollout.segments = (Segment(tokens),) if tokens.mask else ()
            return
        old = segments[segment]
        self.rollout.segments = (
            *segments[:segment], Segment(tokens, old.parent, old.start), *segments[segment + 1 :],
        )  # fmt: skip

    def add(self, turn: Turn, recorded: Turn | None) -> int:
        """A turn that is finished, in place of what is on record of it; returns its place in the record.

        Finished turns stand before those of other segments that were interrupted, so their places never change.
        """
        others = [other for other in self.rollout.turns if other is not recorded]
        place = len(others)
        while place and others[place - 1].finish_reason is FinishReason.ABORT:
            place -= 1
        self.rollout.turns = (*others[:place], turn, *others[place:])
        self._done[turn.segment] += 1
        return place

    def cut_off(self, turn: Turn, recorded: Turn | None) -> None:
        """A turn that a pause interrupted, after all others."""
        self.rollout.turns = (*(other for other in self.rollout.turns if other is not recorded), turn)

    def sort_calls(self, segment: int, number: int) -> None:
        """The last calls as they were made, not as they ended: who reads the record sees the same every time."""
        done = self._done[segment]
        turns = [*self.rollout.turns]
        places = [place for place, turn in enumerate(turns) if turn.segment == segment][done - number : done]
        for place, turn in zip(places, sorted([turns[p] for p in places], key=lambda turn: turn.call), strict=True):
            turns[place] = turn
        self.rollout.turns = tuple(turns)

    def leave_out(self, segment: int, begin: int, end: int) -> None:
        """These tokens of a segment stay as context and are not trained."""
        tokens = self.tokens(segment)
        mask = tokens.mask[:begin] + bytes(end - begin) + tokens.mask[end:]
        self.set_tokens(segment, Tokens(tokens.ids, tokens.logprobs, mask, tokens.steps))

    def train_only(self, answers: Set[tuple[int, int]]) -> None:
        """Of what the model wrote, only these are trained, each by its segment and its first token there.

        The rest stays as context: also what is on record and was not read back, and what a call that ended too early
        left there.
        """
        begins: Counter[int] = Counter()
        for turn in self.rollout.turns:
            begin = begins[turn.segment]
            begins[turn.segment] += turn.num_tokens
            if turn.kind == GENERATE and (turn.segment, begin) not in answers:
                self.leave_out(turn.segment, begin, begin + turn.num_tokens)


def last_tokens(tokens: Tokens, n: int) -> Tokens:
    """The last n tokens."""
    first = len(tokens) - n
    if first <= 0:
        return tokens
    runs, left = [], n
    for step, length in reversed(tokens.steps):
        if left:
            runs.append((step, min(length, left)))
            left -= runs[-1][1]
    return Tokens(tokens.ids[4 * first :], tokens.logprobs[4 * first :], tokens.mask[first:], tuple(reversed(runs)))
