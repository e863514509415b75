"""A train batch as micro-batches: which tokens go through the model together, and where each token is predicted.

One prompt and K of its answers make a segment. The prompt stands in it once:

    tokens      p0 p1 p2 | a0 a1 a2 | b0 b1
    positions    0  1  2 |  3  4  5 |  3  4        each answer goes on where the prompt ends
    predicts           ^ a0 and b0      ^ b1       the last prompt token predicts the first token of every answer

An answer attends to its prompt and causally to itself. Segments are laid into rows, rows of near length into a
micro-batch of at most `max_tokens` cells, padding included. Under a mask, padded rows beat one long row: attention over
a long row costs the square of all its segments together. A model that attends segment by segment takes one row, without
padding. What predicts no trained token is not computed, above all an answer's last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.learn.batch import TrainAnswer, TrainBatch

LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Cells [rows, length], and one entry per trained token in the flat columns below them."""

    input_ids: LongArray
    position_ids: LongArray
    blocks: LongArray
    """Which segment a cell belongs to, unique in its row; each cell of padding is a block of its own."""
    branches: LongArray
    """0 for the prompt, k for the k-th answer of the segment."""
    predicting: LongArray
    """Index of the cell, in the flattened rows, whose logits predict the token."""
    targets: LongArray
    engine_logprobs: FloatArray
    advantages: FloatArray
    answer_index: LongArray
    """Which answer of the batch the token belongs to."""
    token_index: LongArray
    """Which token of that answer it is."""

    @property
    def num_cells(self) -> int:
        return int(self.input_ids.size)

    @property
    def num_used(self) -> int:
        return int((self.blocks >= 0).sum())


@dataclass(frozen=True, eq=False)
class _Part:
    """An answer and what of it is needed: the wanted tokens, and the tokens before the last of them as input."""

    index: int
    answer: TrainAnswer
    wanted: LongArray

    @property
    def num_inputs(self) -> int:
        return int(self.wanted[-1])


@dataclass(frozen=True, eq=False)
class _Segment:
    prompt_ids: npt.NDArray[np.int32]
    parts: list[_Part]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + sum(part.num_inputs for part in self.parts)


def pack(
    batch: TrainBatch,
    *,
    max_tokens: int,
    share_prompts: bool = True,
    one_row: bool = False,
    every_token: bool = False,
) -> list[MicroBatch]:
    """Every trained token (or every token at all) of the batch, exactly once.

    A group larger than `max_tokens` is split, each piece with its prompt; a single answer is never split, so one that
    is larger alone makes a micro-batch of its own. Without `share_prompts` each answer is a row with its own prompt,
    which a plain causal mask serves; with `one_row` all of them lie in a single one.
    """
    segments = _segments(batch, max_tokens if share_prompts else 0, every_token)
    # Longest first, so that the rows of a micro-batch have near lengths; the sort is stable, hence repeatable.
    waiting = sorted(segments, key=lambda segment: -segment.length)
    micro_batches = []
    while waiting:
        if one_row:
            rows, waiting = _fill_one_row(waiting, max_tokens)
        else:
            rows, waiting = _fill(waiting, max_tokens, several_per_row=share_prompts)
        micro_batches.append(_lay_out(rows))
    return micro_batches


def _segments(batch: TrainBatch, max_tokens: int, every_token: bool) -> list[_Segment]:
    segments: list[_Segment] = []
    index = -1
    for group in batch.groups:
        open_parts: list[_Part] = []
        length = len(group.prompt_ids)
        for answer in group.answers:
            index += 1
            wanted = np.arange(len(answer.ids)) if every_token else np.flatnonzero(answer.mask)
            if not len(wanted):
                continue
            part = _Part(index, answer, wanted)
            if open_parts and length + part.num_inputs > max_tokens:
                segments.append(_Segment(group.prompt_ids, open_parts))
                open_parts, length = [], len(group.prompt_ids)
            open_parts.append(part)
            length += part.num_inputs
        if open_parts:
            segments.append(_Segment(group.prompt_ids, open_parts))
    return segments


def _fill_one_row(waiting: list[_Segment], max_tokens: int) -> tuple[list[list[_Segment]], list[_Segment]]:
    row = [waiting[0]]
    room = max_tokens - waiting[0].length
    left = []
    for segment in waiting[1:]:
        if segment.length <= room:
            row.append(segment)
            room -= segment.length
        else:
            left.append(segment)
    return [row], left


def _fill(
    waiting: list[_Segment], max_tokens: int, *, several_per_row: bool
) -> tuple[list[list[_Segment]], list[_Segment]]:
    """Rows as long as the first segment, first fit, as many as the budget allows; and what did not fit."""
    length = waiting[0].length
    max_rows = max(1, max_tokens // length)
    rows: list[list[_Segment]] = []
    room: list[int] = []
    left = []
    for segment in waiting:
        fitting = (i for i, free in enumerate(room) if several_per_row and free >= segment.length)
        row = next(fitting, None)
        if row is not None:
            rows[row].append(segment)
            room[row] -= segment.length
        elif len(rows) < max_rows:
            rows.append([segment])
            room.append(length - segment.length)
        else:
            left.append(segment)
    return rows, left


def _lay_out(rows: list[list[_Segment]]) -> MicroBatch:
    length = max(sum(segment.length for segment in row) for row in rows)
    shape = (len(rows), length)
    input_ids, position_ids, branches = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    blocks = np.broadcast_to(-1 - np.arange(length, dtype=np.int64), shape).copy()
    # One list per token column, all grown by the same call: they cannot differ in length.
    columns: list[tuple[npt.NDArray[np.generic], ...]] = []
    for row, segments in enumerate(rows):
        start = 0
        for block, segment in enumerate(segments):
            num_prompt = len(segment.prompt_ids)
            last_prompt = row * length + start + num_prompt - 1
            at = start + num_prompt
            input_ids[row, start:at] = segment.prompt_ids
            position_ids[row, start:at] = np.arange(num_prompt)
            for branch, part in enumerate(segment.parts, 1):
                end = at + part.num_inputs
                input_ids[row, at:end] = part.answer.ids[: part.num_inputs]
                position_ids[row, at:end] = num_prompt + np.arange(part.num_inputs)
                branches[row, at:end] = branch
                # The one shift: token j is predicted by the cell of token j - 1, the first by the prompt's last.
                predicting = np.where(part.wanted == 0, last_prompt, row * length + at + part.wanted - 1)
                columns.append(_token_columns(part, predicting))
                at = end
            blocks[row, start:at] = block
            start = at
    predicting, targets, logprobs, advantages, answer_index, token_index = (
        np.concatenate(column) for column in zip(*columns, strict=True)
    )
    return MicroBatch(
        input_ids, position_ids, blocks, branches, predicting, targets, logprobs, advantages, answer_index, token_index
    )  # fmt: skip


def _token_columns(part: _Part, predicting: LongArray) -> tuple[npt.NDArray[np.generic], ...]:
    answer, wanted = part.answer, part.wanted
    return (
        predicting.astype(np.int64),
        answer.ids[wanted].astype(np.int64),
        answer.logprobs[wanted],
        answer.advantages[wanted],
        np.full(len(wanted), part.index, dtype=np.int64),
        wanted.astype(np.int64),
    )
