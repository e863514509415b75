"""Finished turns of a rollout that a restart found being played, put back onto its record.

What the ledger has of such a rollout is its content when the group was last stored, and a row for each turn that
finished since. A row with a place that is already there stands for it and all that came after it: an interrupted turn
that was continued, or an answer that was begun again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.replay.codec import StoredTurn, decode_turn
from penstock.replay.schema import TurnRow
from penstock.rollout import NO_TOKENS, Group, RolloutState, Segment, Status, Tokens, fill_model_steps


def put_back_turns(rollout: RolloutState, rows: Iterable[TurnRow], *, model_step: int) -> int:
    """Bring the rollout to where the rows say it was. Returns how many tokens that it had before are gone.

    `model_step` is for tokens of unknown origin.
    """
    had = rollout.segments
    kept = len(rollout.turns)
    for row in rows:
        kept = min(kept, row.place)
        _cut(rollout, row.place)
        _append(rollout, decode_turn(row.content))
    fill_model_steps(rollout, model_step)
    held = _tokens_by_segment(rollout, kept)
    return sum(
        len(before.tokens) - held[number]
        for number, before in enumerate(had)
        if not _goes_on(before.tokens, rollout.segments[number].tokens if number < len(rollout.segments) else NO_TOKENS)
    )


def require_turns(group: Group, rows: Iterable[TurnRow]) -> None:
    """Raises ValueError when a turn before one of the rows is missing, or its rollout."""
    turns = {r.rollout_id: len(r.turns) if r.status is not Status.EXPIRED else 0 for r in group}
    for row in rows:
        if row.place > turns[row.rollout_id]:
            raise ValueError(f"turn {turns[row.rollout_id]} of rollout {row.rollout_id!r} is missing")
        turns[row.rollout_id] = row.place + 1


def _goes_on(before: Tokens, after: Tokens) -> bool:
    return after.ids.startswith(before.ids) and after.logprobs.startswith(before.logprobs)


def _tokens_by_segment(rollout: RolloutState, turns: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for turn in rollout.turns[:turns]:
        counts[turn.segment] += turn.num_tokens
    return counts


def _cut(rollout: RolloutState, turns: int) -> None:
    """Leave these first turns and their tokens."""
    counts = _tokens_by_segment(rollout, turns)
    rollout.turns = rollout.turns[:turns]
    rollout.segments = tuple(
        Segment(_head(segment.tokens, counts[number]), segment.parent, segment.start)
        for number, segment in enumerate(rollout.segments[: max(counts, default=-1) + 1])
    )


def _append(rollout: RolloutState, stored: StoredTurn) -> None:
    number = stored.turn.segment
    segments = [*rollout.segments]
    # Segments may be begun side by side, and finish their first turns in any order.
    segments += [Segment()] * (number + 1 - len(segments))
    # Calls of tools may be on record before it has a token, and before it is known where it goes on from.
    begun = any(turn.segment == number and turn.num_tokens for turn in rollout.turns)
    place = segments[number] if begun else Segment(NO_TOKENS, stored.parent, stored.start)
    segments[number] = Segment(_joined(place.tokens, stored.tokens), place.parent, place.start)
    rollout.segments = tuple(segments)
    rollout.turns = (*rollout.turns, stored.turn)


def _joined(head: Tokens, tail: Tokens) -> Tokens:
    joined = head.append(tail.ids, tail.logprobs, steps=tail.steps)
    return Tokens(joined.ids, joined.logprobs, head.mask + tail.mask, joined.steps)


def _head(tokens: Tokens, n: int) -> Tokens:
    """The first n."""
    if n >= len(tokens):
        return tokens
    runs, left = [], n
    for step, count in tokens.steps:
        runs.append((step, min(count, left)))
        left -= runs[-1][1]
    cut = NO_TOKENS.append(tokens.ids[: 4 * n], tokens.logprobs[: 4 * n], steps=runs)
    return Tokens(cut.ids, cut.logprobs, tokens.mask[:n], cut.steps)
