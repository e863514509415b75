"""Keys and values of the running answers: one slot each, in tensors that grow when longer or more answers come.

Slots are the first dimension, so the first n slots are a view. Everything is zero at first: a masked position has
probability 0, but 0 times a NaN of uninitialised memory would still be NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

LENGTH_STEP = 32
"""Lengths are rounded up to a multiple of this."""


class LayerShape(NamedTuple):
    heads: int
    key_dim: int
    value_dim: int
    turned: bool = False
    """Keys lie head dimension by head dimension, tokens side by side, and are seen as if they lay token by token."""


class Prefix:
    """Keys and values of one prompt, computed chunk by chunk: `done` of `ids` are there."""

    def __init__(self, ids: Tensor, layers: list[LayerShape], dtype: torch.dtype) -> None:
        self.ids = ids
        self.done = 0
        room = round_up(len(ids))

        def zeros(heads: int, dim: int) -> Tensor:
            return torch.zeros(heads, room, dim, dtype=dtype, device=ids.device)

        self.keys = [zeros(layer.heads, layer.key_dim) for layer in layers]
        self.values = [zeros(layer.heads, layer.value_dim) for layer in layers]

    @property
    def ready(self) -> bool:
        return self.done == len(self.ids)

    def begin_as(self, other: Prefix, count: int) -> None:
        """Take over the first `count` tokens, which are the same and computed there."""
        for mine, theirs in zip(self.keys + self.values, other.keys + other.values, strict=True):
            mine[:, :count] = theirs[:, :count]
        self.done = count


class SlotCache:
    def __init__(self, layers: list[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self.slots = 0
        self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.release()

    def release(self) -> None:
        """Give the memory back. The next `reserve` takes what is needed then."""
        self.slots = self.length = 0
        self.keys = [self._new_keys(layer) for layer in self._layers]
        self.values = [self._new_values(layer) for layer in self._layers]

    def reserve(self, slots: int, length: int, *, max_slots: int, max_length: int) -> None:
        """Make room for so many slots of so many tokens; at least doubles what has to grow, up to the maxima."""
        if slots <= self.slots and length <= self.length:
            return
        if slots > self.slots:
            slots = min(max(slots, 2 * self.slots), max_slots)
        if length > self.length:
            length = min(max(round_up(length), 2 * self.length), round_up(max_length))
        old_slots, old_length = self.slots, self.length
        self.slots, self.length = max(slots, old_slots), max(length, old_length)
        for tensors, make in ((self.keys, self._new_keys), (self.values, self._new_values)):
            for index, (old, layer) in enumerate(zip(tensors, self._layers, strict=True)):
                # One layer at a time: the old and the new cache never both exist as a whole.
                new = make(layer)
                new[:old_slots, :, :old_length] = old
                tensors[index] = new

    def place(self, prefix: Prefix, slots: Iterable[int]) -> None:
        """Slots that lie side by side, as they do in a new batch, are filled at once."""
        n = len(prefix.ids)
        for run in _runs(slots):
            for mine, theirs in zip(self.keys + self.values, prefix.keys + prefix.values, strict=True):
                mine[run, :, :n] = theirs[:, :n]

    def copy(self, source: int, slot: int, length: int) -> None:
        """The first `length` tokens of one slot into another."""
        for tensor in self.keys + self.values:
            tensor[slot, :, :length] = tensor[source, :, :length]

    def copy_out(self, slot: int, length: int) -> list[Tensor]:
        """The first `length` tokens of a slot, for `put_back`."""
        return [tensor[slot, :, :length].clone() for tensor in self.keys + self.values]

    def put_back(self, slot: int, saved: list[Tensor]) -> None:
        for tensor, copy in zip(self.keys + self.values, saved, strict=True):
            tensor[slot, :, : copy.shape[1]] = copy

    def wipe(self, slot: int, start: int) -> None:
        """Zero a slot from `start` on."""
        for tensor in self.keys + self.values:
            tensor[slot, :, start:] = 0

    def _new_keys(self, layer: LayerShape) -> Tensor:
        if layer.turned:
            return self._zeros(layer.heads, layer.key_dim, self.length).transpose(-1, -2)
        return self._zeros(layer.heads, self.length, layer.key_dim)

    def _new_values(self, layer: LayerShape) -> Tensor:
        return self._zeros(layer.heads, self.length, layer.value_dim)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(self.slots, *shape, dtype=self._dtype, device=self._device)


def round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _runs(numbers: Iterable[int]) -> list[slice]:
    """Of neighbours: 3, 4, 5 and 9 are 3:6 and 9:10."""
    runs: list[slice] = []
    for number in sorted(numbers):
        if runs and runs[-1].stop == number:
            runs[-1] = slice(runs[-1].start, number + 1)
        else:
            runs.append(slice(number, number + 1))
    return runs
