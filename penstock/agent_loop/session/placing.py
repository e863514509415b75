"""Where in a rollout's record a request belongs: which segment its tokens go on, and which of them are new.

goes on from the end of a segment           that segment
is on record from before a restart          the segment that has it, read back
anything else                               a new segment, from the deepest token that it shares with one
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.agent_loop.session.tree import Recorded
from penstock.agent_loop.transcript import Transcript
from penstock.rollout import ROOT, WHOLE


class Place(NamedTuple):
    segment: int
    new: bytes
    """The ids to append before the answer, packed."""


class Placing:
    def __init__(self, transcript: Transcript) -> None:
        transcript.recall()
        self._transcript = transcript
        self._rollout = transcript.rollout
        self._open = {turn.segment for turn in self._rollout.turns}
        """Segments that wait for a request: of an earlier playing, or because their answer failed."""
        self._busy: set[int] = set()
        self._begun = bool(self._rollout.turns)

    def take(self, after: Recorded | None, ids: bytes) -> Place:
        """The place of a request that says `ids` after an answer, or after nothing. It is the caller's until `leave`.

        What is not taken from the record stays for another request.
        """
        place = self._same_segment(after, ids) or self._on_record(after, ids) or self._branch(after, ids)
        self._begun = True
        self._open.discard(place.segment)
        self._busy.add(place.segment)
        return place

    def leave(self, segment: int, *, answered: bool) -> None:
        self._busy.discard(segment)
        if not answered:
            self._open.add(segment)

    def num_before(self, after: Recorded | None) -> int:
        """Tokens up to the end of an answer."""
        if after is None:
            return 0
        assert after.resume_at is not None, "nothing follows a cut answer"
        return len(self._context(after.segment)) // 4 + after.resume_at

    def _same_segment(self, after: Recorded | None, ids: bytes) -> Place | None:
        if after is None or after.segment in self._busy or after.resume_at is None:
            return None
        if self._transcript.record.position(after.segment) != after.resume_at:
            return None
        # What an earlier playing said here must be said again; another word is another branch.
        recorded = self._transcript.record.ahead(after.segment)
        return Place(after.segment, ids) if recorded is None or recorded == ids else None

    def _on_record(self, after: Recorded | None, ids: bytes) -> Place | None:
        waiting = sorted(self._open - self._busy)
        if not waiting:
            return None
        wanted = self._path(after) + ids
        for segment in waiting:
            done = 4 * self._transcript.record.position(segment)
            said = self._transcript.record.ahead(segment) or b""
            before = self._context(segment) + self._ids(segment)[:done]
            if before + said == wanted:
                return Place(segment, said)
        return None

    def _branch(self, after: Recorded | None, ids: bytes) -> Place:
        parent, start, shared = self._shared(after, ids)
        new = ids[shared:]
        if parent == ROOT and start == len(self._rollout.prompt.ids) // 4:
            start = WHOLE
        if self._begun:
            return Place(self._transcript.branch(parent, start), new)
        if start != WHOLE:
            self._transcript.begin(start)
        return Place(0, new)

    def _shared(self, after: Recorded | None, ids: bytes) -> tuple[int, int, int]:
        """(parent, start) of the deepest token that the ids share with the record, and how many bytes they share."""
        if after is not None:
            assert after.resume_at is not None, "nothing follows a cut answer"
            following = self._ids(after.segment)[4 * after.resume_at :]
            same = _common(following, ids)
            return after.segment, after.resume_at + same, 4 * same
        deepest = (ROOT, _common(self._rollout.prompt.ids, ids))
        longest = deepest[1]
        for number in range(len(self._rollout.segments)):
            before = self._context(number)
            same = _common(before + self._ids(number), ids)
            if same > longest and same > len(before) // 4:
                deepest, longest = (number, same - len(before) // 4), same
        return (*deepest, 4 * longest)

    def _path(self, after: Recorded | None) -> bytes:
        """Everything up to the end of an answer."""
        if after is None:
            return b""
        assert after.resume_at is not None, "nothing follows a cut answer"
        return self._context(after.segment) + self._ids(after.segment)[: 4 * after.resume_at]

    def _context(self, segment: int) -> bytes:
        """What comes before a segment; the first of a rollout may be without a token, and so not there yet."""
        return self._rollout.context_ids(segment) if self._rollout.segments else self._rollout.prompt.ids

    def _ids(self, segment: int) -> bytes:
        return self._rollout.segments[segment].tokens.ids if self._rollout.segments else b""


def _common(one: bytes, other: bytes) -> int:
    """How many ids both begin with."""
    n = min(len(one), len(other)) // 4
    different = np.nonzero(np.frombuffer(one[: 4 * n], np.int32) != np.frombuffer(other[: 4 * n], np.int32))[0]
    return int(different[0]) if len(different) else n
