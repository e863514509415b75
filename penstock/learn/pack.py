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

Prompts that begin alike, with the same instructions or tools, are one tree too where a model attends run by run: such a
prompt goes on from the place in another where they part.

Trees are laid into rows, rows of near length into a micro-batch of at most `max_tokens` cells, padding included. Under
a mask, padded rows beat one long row: attention over a long row costs the square of all its trees together. A model
that attends run by run takes one row, without padding. What predicts no trained token is not computed, above all an
answer's last token.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.learn.batch import TrainBatch, TrainSegment
from penstock.rollout import ROOT, IntArray
from penstock.tokens import common_beginning

LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

NOTHING: LongArray = np.zeros(0, dtype=np.int64)


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
    answer_index: LongArray
    """Which answer of the batch the token belongs to."""
    token_index: LongArray
    """Which token of the batch it is, counted over its segments in order."""
    engine_logprobs: FloatArray
    advantages: FloatArray
    temperatures: FloatArray
    model_steps: IntArray
    reference_logprobs: FloatArray | None = None
    proximal_logprobs: FloatArray | None = None

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


_Bundle = list[_Piece]


def pack(
    batch: TrainBatch,
    *,
    max_tokens: int,
    share_prompts: bool = True,
    one_row: bool = False,
    every_token: bool = False,
    whole_answers: bool = False,
    answers: LongArray | None = None,
) -> list[MicroBatch]:
    """Every trained token (or every token that has a context) of the batch, or of these `answers` of it, exactly once.

    A tree larger than `max_tokens` is split, each piece with its context; a single segment is never split, so one that
    is larger alone makes a micro-batch of its own. With `whole_answers` that holds for an answer of several segments.
    Without `share_prompts` each segment is a row with all that comes before it, which a plain causal mask serves; with
    `one_row` all of them lie in a single one.
    """
    bundles = [
        bundle
        for tree in _trees(
            batch, every_token, None if answers is None else set(answers.tolist()), share_beginnings=one_row
        )
        for bundle in _bundles(tree, max_tokens, share_prompts=share_prompts, whole_answers=whole_answers)
    ]
    # Longest first, so that the rows of a micro-batch have near lengths; the sort is stable, hence repeatable.
    waiting = sorted(bundles, key=lambda bundle: -max(piece.length for piece in bundle))
    micro_batches = []
    while waiting:
        if one_row:
            rows, waiting = _fill_one_row(waiting, max_tokens)
        else:
            rows, waiting = _fill(waiting, max_tokens, several_per_row=share_prompts)
        micro_batches.append(_lay_out(rows))
    return micro_batches


def _trees(
    batch: TrainBatch, every_token: bool, answers: set[int] | None, *, share_beginnings: bool
) -> list[list[_Run]]:
    """One for each prompt, whichever groups ask it; or for all prompts that begin alike."""
    roots = _plant({group.prompt_ids.tobytes(): group.prompt_ids for group in batch.groups}, share_beginnings)
    answer_index, first_token = -1, 0
    for group in batch.groups:
        tree, prompt = roots[group.prompt_ids.tobytes()]
        for answer in group.answers:
            answer_index += 1
            base = len(tree)
            for segment in answer.segments:
                if segment.parent == ROOT:
                    num_before = segment.start
                    parent, start = _place_in(tree, prompt, num_before)
                else:
                    parent, start = base + segment.parent, segment.start
                    num_before = tree[parent].num_before + start
                wanted = np.arange(len(segment)) if every_token else np.flatnonzero(segment.mask)
                if answers is not None and answer_index not in answers:
                    wanted = NOTHING
                if not num_before:
                    # What nothing comes before is not predicted.
                    wanted = wanted[wanted > 0]
                tree.append(_Run(segment.ids, parent, start, num_before, wanted, segment, answer_index, first_token))
                first_token += len(segment)
    return list({id(tree): tree for tree, _ in roots.values()}.values())


def _plant(prompts: dict[bytes, IntArray], share_beginnings: bool) -> dict[bytes, tuple[list[_Run], int]]:
    """For each prompt its tree, and its run there. One that begins as another goes on from where they part."""
    roots: dict[bytes, tuple[list[_Run], int]] = {}
    if not share_beginnings:
        return {key: ([_Run(ids, ROOT, 0, 0, NOTHING)], 0) for key, ids in prompts.items()}
    last: bytes | None = None
    # Of all prompts before it in this order, the last has the most in common with the next.
    for key, ids in sorted(prompts.items(), key=lambda prompt: prompt[1].tolist()):
        shared = common_beginning(prompts[last], ids) if last is not None else 0
        if last is not None and shared:
            tree, prompt = roots[last]
            parent, start = _place_in(tree, prompt, shared)
        else:
            tree, parent, start = [], ROOT, 0
        roots[key] = (tree, len(tree))
        tree.append(_Run(ids[shared:], parent, start, shared, NOTHING))
        last = key
    return roots


def _place_in(tree: list[_Run], prompt: int, num_tokens: int) -> tuple[int, int]:
    """Where so many tokens of a prompt end: in which run, and after how many of its own tokens."""
    while num_tokens < tree[prompt].num_before:
        prompt = tree[prompt].parent
    return prompt, num_tokens - tree[prompt].num_before


def _bundles(tree: list[_Run], max_tokens: int, *, share_prompts: bool, whole_answers: bool) -> Iterator[_Bundle]:
    """Pieces that must be in one micro-batch: one alone, but for an answer of several rows that is kept whole."""
    wanted = [index for index, run in enumerate(tree) if len(run.wanted)]
    answers = itertools.groupby(wanted, key=lambda index: tree[index].answer_index)
    units = [list(indices) for _, indices in answers] if whole_answers else [[index] for index in wanted]
    if share_prompts:
        yield from ([piece] for piece in _pieces(tree, units, max_tokens))
    else:
        yield from ([_grow(_Piece(tree, {}, []), index) for index in unit] for unit in units)


def _pieces(tree: list[_Run], units: list[list[int]], max_tokens: int) -> Iterator[_Piece]:
    """Each with as many units of runs as fit, at least one."""
    piece = _Piece(tree, {}, [])
    for unit in units:
        grown = _Piece(tree, dict(piece.sizes), list(piece.wanted))
        for index in unit:
            _grow(grown, index)
        if piece.wanted and grown.length > max_tokens:
            yield piece
            grown = _Piece(tree, {}, [])
            for index in unit:
                _grow(grown, index)
        piece = grown
    if piece.wanted:
        yield piece


def _grow(piece: _Piece, index: int) -> _Piece:
    """Make it hold this run too, with all that comes before it."""
    piece.wanted.append(index)
    size = int(piece.tree[index].wanted[-1])
    while index != ROOT:
        piece.sizes[index] = max(size, piece.sizes.get(index, 0))
        run = piece.tree[index]
        index, size = run.parent, run.start
    return piece


def _fill_one_row(waiting: list[_Bundle], max_tokens: int) -> tuple[list[list[_Piece]], list[_Bundle]]:
    row: list[_Piece] = []
    room = max_tokens
    left = []
    for bundle in waiting:
        length = sum(piece.length for piece in bundle)
        if length <= room or not row:
            row += bundle
            room -= length
        else:
            left.append(bundle)
    return [row], left


def _fill(
    waiting: list[_Bundle], max_tokens: int, *, several_per_row: bool
) -> tuple[list[list[_Piece]], list[_Bundle]]:
    """Rows as long as the first piece, first fit, as many as the budget allows; and what did not fit."""
    length = max(piece.length for piece in waiting[0])
    max_rows = max(1, max_tokens // length)
    rows: list[list[_Piece]] = []
    room: list[int] = []
    left = []
    for bundle in waiting:
        fitting = (i for i, free in enumerate(room) if several_per_row and free >= bundle[0].length)
        row = next(fitting, None)
        if row is not None:
            # Where rows are shared every bundle is one piece.
            rows[row] += bundle
            room[row] -= bundle[0].length
        elif not rows or len(rows) + len(bundle) <= max_rows:
            rows += [[piece] for piece in bundle]
            room += [length - piece.length for piece in bundle]
        else:
            left.append(bundle)
    return rows, left


def _lay_out(rows: list[list[_Piece]]) -> MicroBatch:
    lengths = np.asarray([sum(piece.length for piece in row) for row in rows], dtype=np.int64)
    shape = (len(rows), int(lengths.max()))
    input_ids, position_ids = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    ends = np.broadcast_to(1 + np.arange(shape[1], dtype=np.int64), shape).copy()
    starts: list[int] = []
    # All columns of a run are made by the same call: they cannot differ in length.
    columns: list[dict[str, npt.NDArray[Any]]] = []
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
    if len({frozenset(found) for found in columns}) > 1:
        raise ValueError("some segments of the batch have columns that others lack")
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        ends=ends,
        lengths=lengths,
        runs=np.asarray(starts, dtype=np.int64),
        **{name: np.concatenate([found[name] for found in columns]) for name in columns[0]},
    )


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


def _token_columns(run: _Run, start: int, before: int) -> dict[str, npt.NDArray[Any]]:
    """By the names of the fields of `MicroBatch`."""
    segment, wanted = run.segment, run.wanted
    assert segment is not None, "a prompt is not trained"
    optional = {
        "reference_logprobs": segment.reference_logprobs,
        "proximal_logprobs": segment.proximal_logprobs,
    }
    return {
        # The one shift: token j is predicted by the cell of token j - 1, the first by the last of its context.
        "predicting": np.where(wanted == 0, before, start + wanted - 1).astype(np.int64),
        "targets": segment.ids[wanted].astype(np.int64),
        "answer_index": np.full(len(wanted), run.answer_index, dtype=np.int64),
        "token_index": (run.first_token + wanted).astype(np.int64),
        "engine_logprobs": segment.logprobs[wanted],
        "advantages": segment.advantages[wanted],
        "temperatures": segment.temperatures[wanted],
        "model_steps": segment.model_steps[wanted],
        **{name: column[wanted] for name, column in optional.items() if column is not None},
    }
