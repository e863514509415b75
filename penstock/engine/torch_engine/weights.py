"""The engine's weights, and how new ones get there. A load is checked as a whole before anything changes.

A block is one tensor of the engine with the named tensors that lie in it one behind the other: q, k and v are one.
New weights are copied into the engine's own memory, converting dtype and device. Where they lie in memory that their
owner lends, in the same order and dtype, they are used in place instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.errors import WeightSyncError
from penstock.models.rounding import copy_weights
from penstock.ports import LentWeights, WeightSource

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""numpy does not know every dtype of torch; a copy does not care."""
_THREADS = min(4, os.cpu_count() or 1)


@dataclass
class _Block:
    tensor: Tensor
    shapes: dict[str, torch.Size]
    """Of the named tensors in it, in their order."""
    borrowed: bool = False

    def parts(self) -> dict[str, Tensor]:
        """Each named tensor as a view of the block."""
        if len(self.shapes) == 1:  # in whatever order it lies
            return dict.fromkeys(self.shapes, self.tensor.detach())
        pieces = self.tensor.detach().view(-1).split([shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(self.shapes[name]) for name, piece in zip(self.shapes, pieces, strict=True)}


class EngineWeights:
    """Blocks by the names of what is in them. `optional` names are ignored: other names of tensors that are here."""

    def __init__(self, optional: frozenset[str] = frozenset()) -> None:
        self._optional = optional
        self._blocks: list[_Block] = []
        self._give_back: Callable[[], None] = lambda: None
        """Ends the loan that blocks are used from."""

    def add(self, tensor: Tensor, shapes: Mapping[str, torch.Size]) -> None:
        """A tensor of the engine, contiguous if it holds several. It may have other memory after a load."""
        self._blocks.append(_Block(tensor, dict(shapes)))

    def load(self, source: WeightSource) -> None:
        """Raises WeightSyncError, the old weights kept. Any other error comes in the middle: then these are useless."""
        if isinstance(source, LentWeights):
            self._load_lent(source)
        else:
            self._load(source, lent=False)

    def _load_lent(self, source: LentWeights) -> None:
        # First of all: whoever lent them may have given up waiting.
        give_back = source.keep()
        try:
            self._load(source, lent=True)
        except BaseException:
            give_back()
            raise
        if any(block.borrowed for block in self._blocks):
            self._give_back = give_back
        else:
            give_back()

    def _load(self, source: WeightSource, *, lent: bool) -> None:
        given = self._read(source)
        found = [_in_place(block, given) if lent else None for block in self._blocks]
        copies: list[tuple[Tensor, Tensor]] = []
        for block, in_place in zip(self._blocks, found, strict=True):
            if in_place is not None:
                block.tensor.data = in_place
            else:
                if block.borrowed:
                    block.tensor.data = torch.empty_like(block.tensor)
                copies += [(part, given[name]) for name, part in block.parts().items()]
            block.borrowed = in_place is not None
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="penstock-load") as pool:
            list(pool.map(lambda pair: _copy(*pair), copies))
        used_until_now, self._give_back = self._give_back, lambda: None
        used_until_now()

    def _read(self, source: WeightSource) -> dict[str, Tensor]:
        """What is given, by name: exactly what is needed."""
        given: dict[str, Tensor] = {}
        wrong: list[str] = []
        try:
            for name, tensor in source.tensors():
                if name in given:
                    wrong.append(f"{name} was given twice")
                given[name] = tensor
        except Exception as error:
            raise WeightSyncError(f"the weights could not be read, the old ones are kept: {error!r}") from error
        needed = {name: shape for block in self._blocks for name, shape in block.shapes.items()}
        wrong += [f"{name} is missing" for name in needed.keys() - given.keys()]
        wrong += [f"{name} is not a weight of this model" for name in given.keys() - needed.keys() - self._optional]
        wrong += [
            f"{name} has shape {tuple(given[name].shape)}; the model needs {tuple(shape)}"
            for name, shape in needed.items()
            if name in given and given[name].shape != shape
        ]
        if wrong:
            shown = "; ".join(sorted(wrong)[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            raise WeightSyncError(f"weights refused, the old ones are kept: {shown}")
        return given


def _in_place(block: _Block, given: Mapping[str, Tensor]) -> Tensor | None:
    """The block over the memory of what is given, if that lies there as the block needs it."""
    if not block.tensor.is_contiguous():
        return None
    parts = [given[name] for name in block.shapes]
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        fits = part.dtype == block.tensor.dtype and part.device == block.tensor.device and part.is_contiguous()
        if not fits or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if part.storage_offset() != end:
            return None
        end += part.numel()
    return first.detach().as_strided(block.tensor.shape, block.tensor.stride(), first.storage_offset())


@torch.inference_mode()
def _copy(place: Tensor, given: Tensor) -> None:
    """Through numpy where nothing is converted: the threads of torch wait for each other on a busy machine."""
    if place.dtype == given.dtype and place.device.type == given.device.type == "cpu" and place.itemsize in _WORDS:
        word = _WORDS[place.itemsize]
        np.copyto(place.detach().view(word).numpy(), given.detach().view(word).numpy())
    else:
        copy_weights(given, place)
