"""The running answers as columns: one entry per slot, so that a step is array arithmetic and not a loop over rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engine.torch_engine.row import Row
from penstock.engine.torch_engine.sampling import Sampling, fold_seed, uniforms

IntColumn = npt.NDArray[np.int64]
SavedColumns = list[npt.NDArray[Any]]


class Slots:
    def __init__(self, count: int) -> None:
        self.rows: list[Row | None] = [None] * count
        self.active = np.zeros(count, bool)
        self.last_token = np.zeros(count, np.int64)
        self.position = np.zeros(count, np.int64)
        """Of the last token: where its key goes."""
        self.made = np.zeros(count, np.int64)
        self.budget = np.zeros(count, np.int64)
        self.temperature = np.ones(count, np.float32)
        self.seed = np.zeros(count, np.uint64)
        self.next_uniform = np.zeros(count, np.int64)
        self.min_new = np.zeros(count, np.int64)
        """New tokens before the answer may end."""
        self.truncates = np.zeros(count, bool)
        self.own_stops = np.zeros(count, bool)
        """Has stop ids or strings besides the tokenizer's."""
        self.ids = np.zeros((count, 64), np.int32)
        self.logprobs = np.zeros((count, 64), np.float32)

    @property
    def count(self) -> int:
        return int(self.active.sum())

    def put(self, slot: int, row: Row) -> None:
        params = row.request.params
        self.rows[slot] = row
        self.active[slot] = True
        self.last_token[slot] = row.context[-1]
        self.position[slot] = len(row.context) - 1
        self.made[slot] = 0
        self.budget[slot] = row.budget
        self.temperature[slot] = params.temperature
        self.seed[slot] = fold_seed(row.request.seed)
        self.next_uniform[slot] = row.request.first_uniform
        self.min_new[slot] = params.min_tokens - row.given
        self.truncates[slot] = params.truncates
        self.own_stops[slot] = bool(params.stop or params.stop_token_ids)

    def clear(self, slot: int) -> None:
        """An empty slot computes token 0 at position 0, where it harms nobody."""
        self.rows[slot] = None
        for column in self._columns():
            column[slot] = 0

    def copy_out(self, slot: int) -> SavedColumns:
        """All columns of a slot, for `put_back`."""
        return [column[slot].copy() for column in self._columns()]

    def put_back(self, slot: int, row: Row, saved: SavedColumns) -> None:
        self.rows[slot] = row
        for column, value in zip(self._columns(), saved, strict=True):
            if value.ndim:  # a table, which may have grown wider since
                column[slot, : len(value)] = value
            else:
                column[slot] = value

    def move(self, source: int, slot: int) -> None:
        self.rows[slot] = self.rows[source]
        for column in self._columns():
            column[slot] = column[source]
        self.clear(source)

    def how_to_sample(self, n: int) -> Sampling:
        early = self.active[:n] & (self.made[:n] < self.min_new[:n])
        return Sampling(
            temperature=self.temperature[:n],
            uniform=uniforms(self.seed[:n], self.next_uniform[:n]),
            forbidden={slot: sorted(self._row(slot).stop_ids) for slot in indices(early)},
            truncated={slot: self._cut(slot) for slot in indices(self.truncates[:n])},
        )

    def append(self, n: int, ids: IntColumn, logprobs: npt.NDArray[np.float32]) -> None:
        """One more token for each active row among the first n."""
        if int(self.made[:n].max()) >= self.ids.shape[1]:
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)], axis=1)
            self.logprobs = np.concatenate([self.logprobs, np.zeros_like(self.logprobs)], axis=1)
        live = np.flatnonzero(self.active[:n])
        self.ids[live, self.made[live]] = ids[live]
        self.logprobs[live, self.made[live]] = logprobs[live]
        self.last_token[live] = ids[live]
        self.position[live] += 1
        self.made[live] += 1
        self.next_uniform[live] += 1

    def tokens(self, slot: int, start: int = 0) -> tuple[bytes, bytes]:
        made = self.made[slot]
        return self.ids[slot, start:made].tobytes(), self.logprobs[slot, start:made].tobytes()

    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        return (
            self.active,
            self.last_token,
            self.position,
            self.made,
            self.budget,
            self.temperature,
            self.seed,
            self.next_uniform,
            self.min_new,
            self.truncates,
            self.own_stops,
            self.ids,
            self.logprobs,
        )

    def _row(self, slot: int) -> Row:
        row = self.rows[slot]
        assert row is not None
        return row

    def _cut(self, slot: int) -> tuple[float, int, float]:
        params = self._row(slot).request.params
        return params.top_p, params.top_k, params.min_p


def indices(chosen: npt.NDArray[np.bool_]) -> list[int]:
    found: list[int] = np.flatnonzero(chosen).tolist()
    return found
