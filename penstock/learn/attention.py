"""Attention over the cells of a micro-batch that lie in one row: trees of runs, see `pack`.

A mask over the whole row, or over a tree, would compute every pair of answers of which none sees another. Here each run
of cells (a prompt, or one segment) is a row of queries of its own, against the keys of its context and its own; runs of
near length are computed together.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.learn.pack import LongArray, MicroBatch

SLACK = 16
"""Cells by which runs that are computed together may differ, at least; beyond it a quarter of the longest."""


@dataclass(frozen=True)
class _Run:
    start: int
    length: int
    context: LongArray
    """The cells before it that all of its own see."""

    @property
    def num_keys(self) -> int:
        return len(self.context) + self.length


@dataclass(frozen=True, eq=False)
class _Rows:
    """Runs of near length, padded: which cells are queries [B * L], which are keys [B * M], and who sees whom."""

    shape: tuple[int, int, int]
    queries: Tensor
    keys: Tensor
    mask: Tensor


class TreeAttention:
    """Made once for a micro-batch, used by every layer."""

    def __init__(self, micro_batch: MicroBatch) -> None:
        self._rows: list[_Rows] = []
        place = np.zeros(micro_batch.num_cells, dtype=np.int64)
        offset = 0
        for runs in _of_near_length(_runs(micro_batch)):
            rows = _lay_out(runs)
            self._rows.append(rows)
            length = rows.shape[1]
            for index, run in enumerate(runs):
                place[run.start : run.start + run.length] = offset + index * length + np.arange(run.length)
            offset += rows.shape[0] * length
        self._place = torch.from_numpy(place)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[T, heads, d], [T, kv heads, d], [T, kv heads, d] -> [T, heads * d]."""
        width = query.shape[1] * query.shape[2]
        outs = []
        for rows in self._rows:
            num, length, reach = rows.shape
            out = F.scaled_dot_product_attention(
                query.index_select(0, rows.queries).unflatten(0, (num, length)).transpose(1, 2),
                key.index_select(0, rows.keys).unflatten(0, (num, reach)).transpose(1, 2),
                value.index_select(0, rows.keys).unflatten(0, (num, reach)).transpose(1, 2),
                attn_mask=rows.mask.to(query.dtype),
                scale=scale,
                enable_gqa=True,
            )
            outs.append(out.transpose(1, 2).reshape(num * length, width))
        padded = torch.cat(outs) if len(outs) > 1 else outs[0]
        return padded.index_select(0, self._place)


def _runs(micro_batch: MicroBatch) -> list[_Run]:
    if len(micro_batch.ends) != 1:
        raise ValueError(f"a micro-batch of {len(micro_batch.ends)} rows; it must be packed into one")
    [ends], bounds = micro_batch.ends, [*micro_batch.runs.tolist(), micro_batch.num_cells]
    return [_Run(start, end - start, np.flatnonzero(ends[:start] > start)) for start, end in itertools.pairwise(bounds)]


def _of_near_length(runs: list[_Run]) -> list[list[_Run]]:
    groups: list[list[_Run]] = []
    for run in sorted(runs, key=lambda run: (-run.num_keys, -run.length)):
        for group in groups:
            if _near(group[0].num_keys, run.num_keys) and _near(group[0].length, run.length):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _near(first: int, other: int) -> bool:
    return abs(first - other) <= max(SLACK, first // 4)


def _lay_out(runs: list[_Run]) -> _Rows:
    num, length, reach = len(runs), max(run.length for run in runs), max(run.num_keys for run in runs)
    # Padding points at the first cell: masked as a key, and as a query its result is not used.
    queries: LongArray = np.zeros((num, length), dtype=np.int64)
    keys: LongArray = np.zeros((num, reach), dtype=np.int64)
    seen: npt.NDArray[np.bool_] = np.zeros((num, length, reach), dtype=np.bool_)
    for row, run in enumerate(runs):
        own = np.arange(run.start, run.start + run.length)
        queries[row, : run.length] = own
        keys[row, : len(run.context)] = run.context
        keys[row, len(run.context) : run.num_keys] = own
        # Every query sees the first key, also one of padding: a softmax over nothing is not a number.
        seen[row] = np.tri(length, reach, len(run.context), dtype=np.bool_)
    mask = torch.zeros(num, 1, length, reach).masked_fill_(torch.from_numpy(~seen)[:, None], -torch.inf)
    return _Rows((num, length, reach), torch.from_numpy(queries.ravel()), torch.from_numpy(keys.ravel()), mask)
