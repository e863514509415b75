"""Matrices in the order that oneDNN's kernels read, so that a product does not bring them into it each time.

A product of few rows spends much of its time on that. A packed matrix is a copy: it takes as much memory again, and is
made anew when what is in the matrix changes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from penstock.models.bfloat16 import amx_is_hidden, keep_onednn_alive

ROWS = 64
"""That the order is chosen for; it is as good for others."""
WORTH_PACKING = range(32 << 20, 2 << 30)
"""Bytes of a model's matrices: fewer stay in the caches anyway, a copy of more takes memory that a run may need."""


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has such products, for this processor."""
    if dtype == torch.bfloat16 and amx_is_hidden():
        return False  # oneDNN would die of it; MKL's products are faster there anyway
    keep_onednn_alive()
    ones = torch.ones(16, 16, dtype=dtype)
    try:
        packed_product(ones, pack(ones))
    except (AttributeError, RuntimeError):
        return False
    return True


def pack(matrix: Tensor) -> Tensor:
    """A copy of out x in, to be given to `packed_product` and nothing else."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, ROWS)
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (rows x in) through a linear layer (out x in)."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
