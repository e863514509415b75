"""Matrices in the order that kernels read, so that a product does not bring them into it each time.

A product of few rows spends much of its time on that. A packed matrix is a copy: it takes as much memory again, and is
made anew when what is in the matrix changes. bfloat16 is packed for kernels.c where that multiplies it, everything else
for oneDNN. Of what a processor with bfloat16 instructions can do oneDNN reaches two thirds with 64 rows, and it rounds
results to bfloat16: the mismatch between engine and trainer (k3) is 9e-4 then.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from penstock.models.bfloat16 import amx_is_hidden, has_fast_products, keep_onednn_alive
from penstock.models.kernels import Kernels, kernels

ROWS = 64
"""That the order is chosen for; it is as good for others."""
WORTH_PACKING = range(32 << 20, 2 << 30)
"""Bytes of a model's matrices: fewer stay in the caches anyway, a copy of more takes memory that a run may need."""


class Packing(Protocol):
    def pack(self, matrix: Tensor) -> Tensor:
        """A copy of out x in, for `multiply`."""
        ...

    def multiply(self, x: Tensor, packed: Tensor, room: Tensor) -> Tensor:
        """x (rows x in, in the matrix's dtype) through it; into `room` (rows x out, float32) or memory of its own."""
        ...


class OneDnn:
    def pack(self, matrix: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, ROWS)
        return packed

    def multiply(self, x: Tensor, packed: Tensor, room: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return out


class Panels:
    """Of bfloat16, for kernels.c."""

    def __init__(self, compiled: Kernels) -> None:
        self._compiled = compiled

    def pack(self, matrix: Tensor) -> Tensor:
        return self._compiled.panels(matrix)

    def multiply(self, x: Tensor, packed: Tensor, room: Tensor) -> Tensor:
        return self._compiled.product(x, packed, room)


def packing_for(dtype: torch.dtype, depths: Iterable[int]) -> Packing | None:
    """How an engine on this CPU packs matrices that are so wide; None where packing saves nothing."""
    if dtype == torch.bfloat16:
        if has_fast_products():
            return None  # MKL's products with AMX are faster from plain matrices
        compiled = kernels()
        if compiled is not None and compiled.multiplies and all(depth % 2 == 0 for depth in depths):
            return Panels(compiled)
    return OneDnn() if _onednn_packs(dtype) else None


@functools.cache
def _onednn_packs(dtype: torch.dtype) -> bool:
    """Whether this torch has such products, for this processor."""
    if dtype == torch.bfloat16 and amx_is_hidden():
        return False  # oneDNN would die of it
    keep_onednn_alive()
    ones, way = torch.ones(16, 16, dtype=dtype), OneDnn()
    try:
        way.multiply(ones, way.pack(ones), ones)
    except (AttributeError, RuntimeError):
        return False
    return True
