"""A train batch as micro-batches: which tokens go through the model together, and where each token is predicted.

What has the same context is a tree: the prompt, the answers that go on from it, and the segments that go on from
somewhere in another. Each of its runs of tokens stands once. Here the second answer has two segments, b and c, of which
c goes on from b's first token:

    tokens      p0 p1 p2 | a0 a1 a2 | b0 b1 b2 | c0 c1
    positions    0  1  2 |  3  4  5 |  3  4  5 |  4  5       each run goes on where its context ends
    ends        11 11 11 |  6  6  6 | 11  9  9 | 11 11
    predicts           ^ a0 and b0     ^ b1 and c0           the last token of a context predicts what follows

A token sees its ancestors. A run is followed by what goes on from it, the latest place first, so the cells that see a
cell are those from itself to its `ends`: **a query sees a key when key <= query < ends[key]**. That is the one rule,
whoever attends.

Trees are laid into rows, rows of near length into a micro-batch of at most `max_tokens` cells, padding included. Under
a mask, padded rows beat one long row: attention over a long row costs the square of all its trees together. A model
that attends run by run takes one row, without padding. What predicts no trained token is not computed, above all an
answer's last token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.learn.batch import TrainBatch, TrainSegment
from penstock.rollout import ROOT, IntArray

LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

PROMPT = 0
"""The first run of a tree."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Cells [rows, length], and one entry per trained token in the flat columns below them."""

    input_ids: LongArray
    position_ids: LongArray
    ends: LongArray
    """The place in the row just after the last cell that sees this one. A cell of padding is seen by itself alone."""
    lengths: LongArray
    """Of each row, without its padding."""
    runs: LongArray
    """Index, in the flattened rows, of the first cell of every run. All its cells have one context before them."""
    predicting: LongArray
    """Index of the cell, in the flattened rows, whose logits predict the token."""
    targets: LongArray
    engine_logprobs: FloatArray
    advantages: FloatArray
    answer_index: LongArray
    """Which answer of the batch the token belongs to."""
    token_index: LongArray
    """Which token of the batch it is, counted over its segments in order."""

    @property
    def num_cells(self) -> int:
        return int(self.input_ids.size)

    @property
    def num_used(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True, eq=False)
class _Run:
    """A prompt, or a segment with the tokens of it that are wanted."""

    ids: IntArray
    parent: int
    """Its index in the tree; ROOT for the prompt."""
    start: int
    """How many tokens of its parent come before it."""
    num_before: int
    """How many tokens come before it in all."""
    wanted: LongArray
    segment: TrainSegment | None = None
    answer_index: int = 0
    first_token: int = 0
    """Which token of the batch its first one is."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of a tree that is computed together."""

    tree: list[_Run]
    sizes: dict[int, int]
    """The cells that are needed of each run."""
    wanted: list[int]
    """The runs whose wanted tokens are trained here; the others are context."""

    @property
    def length(self) -> int:
        return sum(self.sizes.values())


def pack(
    batch: TrainBatch,
    *,
    max_tokens: int,
    share_prompts: bool = True,
    one_row: bool = False,
    every_token: bool = False,
) -> list[MicroBatch]:
    """Every trained token (or every token that has a context) of the batch, exactly once.

    A tree larger than `max_tokens` is split, each piece with its context; a single segment is never split, so one that
    is larger alone makes a micro-batch of its own. Without `share_prompts` each segment is a row with all that comes
    before it, which a plain causal mask serves; with `one_row` all of them lie in a single one.
    """
    trees = _trees(batch, every_token)
    pieces = [piece for tree in trees for piece in _pieces(tree, max_tokens if share_prompts else 0)]
    # Longest first, so that the rows of a micro-batch have near lengths; the sort is stable, hence repeatable.
    waiting = sorted(pieces, key=lambda piece: -piece.length)
    micro_batches = []
    while waiting:
        if one_row:
            rows, waiting = _fill_one_row(waiting, max_tokens)
        else:
            rows, waiting = _fill(waiting, max_tokens, several_per_row=share_prompts)
        micro_batches.append(_lay_out(rows))
    return micro_batches


def _trees(batch: TrainBatch, every_token: bool) -> list[list[_Run]]:
    """One for each prompt, whichever groups ask it."""
    trees: dict[bytes, list[_Run]] = {}
    nothing = np.zeros(0, dtype=np.int64)
    answer_index, first_token = -1, 0
    for group in batch.groups:
        tree = trees.setdefault(group.prompt_ids.tobytes(), [_Run(group.prompt_ids, ROOT, 0, 0, nothing)])
        for answer in group.answers:
            answer_index += 1
            base = len(tree)
            for segment in answer.segments:
                parent = PROMPT if segment.parent == ROOT else base + segment.parent
                num_before = tree[parent].num_before + segment.start
                wanted = np.arange(len(segment)) if every_token else np.flatnonzero(segment.mask)
                if not num_before:
                    # What nothing comes before is not predicted.
                    wanted = wanted[wanted > 0]
                tree.append(
                    _Run(segment.ids, parent, segment.start, num_before, wanted, segment, answer_index, first_token)
                )
                first_token += len(segment)
    return list(trees.values())


def _pieces(tree: list[_Run], max_tokens: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    piece, length = _Piece(tree, {}, []), 0
    for index, run in enumerate(tree):
        if not len(run.wanted):
            continue
        grown = _grown(piece, index)
        if piece.wanted and length + sum(grown.values()) > max_tokens:
            pieces.append(piece)
            piece, length = _Piece(tree, {}, []), 0
            grown = _grown(piece, index)
        for needed, more in grown.items():
            piece.sizes[needed] = piece.sizes.get(needed, 0) + more
        piece.wanted.append(index)
        length += sum(grown.values())
    return [*pieces, piece] if piece.wanted else pieces


def _grown(piece: _Piece, index: int) -> dict[int, int]:
    """The cells that a piece needs more, by run, when it is to hold this one too."""
    grown = {}
    size = int(piece.tree[index].wanted[-1])
    while index != ROOT:
        grown[index] = max(0, size - piece.sizes.get(index, 0))
        run = piece.tree[index]
        index, size = run.parent, run.start
    return grown


def _fill_one_row(waiting: list[_Piece], max_tokens: int) -> tuple[list[list[_Piece]], list[_Piece]]:
    row = [waiting[0]]
    room = max_tokens - waiting[0].length
    left = []
    for piece in waiting[1:]:
        if piece.length <= room:
            row.append(piece)
            room -= piece.length
        else:
            left.append(piece)
    return [row], left


def _fill(waiting: list[_Piece], max_tokens: int, *, several_per_row: bool) -> tuple[list[list[_Piece]], list[_Piece]]:
    """Rows as long as the first piece, first fit, as many as the budget allows; and what did not fit."""
    length = waiting[0].length
    max_rows = max(1, max_tokens // length)
    rows: list[list[_Piece]] = []
    room: list[int] = []
    left = []
    for piece in waiting:
        fitting = (i for i, free in enumerate(room) if several_per_row and free >= piece.length)
        row = next(fitting, None)
        if row is not None:
            rows[row].append(piece)
            room[row] -= piece.length
        elif len(rows) < max_rows:
            rows.append([piece])
            room.append(length - piece.length)
        else:
            left.append(piece)
    return rows, left


def _lay_out(rows: list[list[_Piece]]) -> MicroBatch:
    lengths = np.asarray([sum(piece.length for piece in row) for row in rows], dtype=np.int64)
    shape = (len(rows), int(lengths.max()))
    input_ids, position_ids = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    ends = np.broadcast_to(1 + np.arange(shape[1], dtype=np.int64), shape).copy()
    starts: list[int] = []
    # One list per token column, all grown by the same call: they cannot differ in length.
    columns: list[tuple[npt.NDArray[np.generic], ...]] = []
    for row, pieces in enumerate(rows):
        base, at = row * shape[1], 0
        for piece in pieces:
            places = _Places(piece, at)
            for index in places.order:
                run, start, size = piece.tree[index], places.start[index], piece.sizes[index]
                input_ids[row, start : start + size] = run.ids[:size]
                position_ids[row, start : start + size] = run.num_before + np.arange(size)
                if size:
                    starts.append(base + start)
            places.write_ends(ends[row])
            columns.extend(
                _token_columns(piece.tree[index], base + places.start[index], base + places.before[index])
                for index in piece.wanted
            )
            at += piece.length
    predicting, targets, logprobs, advantages, answer_index, token_index = (
        np.concatenate(column) for column in zip(*columns, strict=True)
    )
    return MicroBatch(
        input_ids, position_ids, ends, lengths, np.asarray(starts, dtype=np.int64),
        predicting, targets, logprobs, advantages, answer_index, token_index,
    )  # fmt: skip


class _Places:
    """Where the runs of a piece stand in a row, each before everything that goes on from it."""

    def __init__(self, piece: _Piece, at: int) -> None:
        self._piece = piece
        self.order = list(_preorder(piece))
        self.start: dict[int, int] = {}
        self.before = {ROOT: -1}
        """The cell that predicts a run's first token."""
        for index in self.order:
            run = piece.tree[index]
            self.start[index] = at
            at += piece.sizes[index]
            self.before[index] = self.start[run.parent] + run.start - 1 if run.start else self.before[run.parent]

    def write_ends(self, ends: LongArray) -> None:
        tree, sizes = self._piece.tree, self._piece.sizes
        end_of = {index: self.start[index] + sizes[index] for index in self.order}
        for index in self.order:
            ends[self.start[index] : end_of[index]] = end_of[index]
        # From the last one back: a run's end is known, with all that goes on from it, before its parent is looked at.
        for index in reversed(self.order[1:]):
            parent, start = tree[index].parent, tree[index].start
            seen = ends[self.start[parent] : self.start[parent] + start]
            np.maximum(seen, end_of[index], out=seen)
            end_of[parent] = max(end_of[parent], end_of[index])


def _preorder(piece: _Piece) -> Iterator[int]:
    following: dict[int, list[int]] = defaultdict(list)
    for index in sorted(piece.sizes):
        following[piece.tree[index].parent].append(index)
    waiting = following[ROOT]
    while waiting:
        index = waiting.pop()
        yield index
        # The last of these is the next: what goes on from the latest place, and the first of equal ones.
        waiting.extend(sorted(following[index], key=lambda child: (piece.tree[child].start, -child)))


def _token_columns(run: _Run, start: int, before: int) -> tuple[npt.NDArray[np.generic], ...]:
    segment, wanted = run.segment, run.wanted
    assert segment is not None, "a prompt is not trained"
    # The one shift: token j is predicted by the cell of token j - 1, the first by the last of its context.
    predicting = np.where(wanted == 0, before, start + wanted - 1)
    return (
        predicting.astype(np.int64),
        segment.ids[wanted].astype(np.int64),
        segment.logprobs[wanted],
        segment.advantages[wanted],
        np.full(len(wanted), run.answer_index, dtype=np.int64),
        (run.first_token + wanted).astype(np.int64),
    )
