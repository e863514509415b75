"""bfloat16 copies of weights, the same wherever they are made: by the trainer for its products, by an engine to serve.

Rounded to the nearest, a copy does not move with its weights. One eighth of the weights of a float16 checkpoint lie
exactly between two bfloat16 numbers: the smallest update, whatever the learning rate, moves them by a whole spacing,
and the policy by hundreds of times what it should. Those of a bfloat16 checkpoint lie on one: for a hundred updates
nothing moves, and then all of them at once.

So every place of a tensor has a threshold of its own between two neighbours, spread evenly and always the same. Of
weights that moved by a share d of the spacing, whatever they were, a share d moves by one: on the average a copy
is its weights. What bfloat16 can say is kept as it is. The error is, in its square, twice that of rounding to
the nearest; an engine and a trainer that make the same copies do not differ by it.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

_PERIOD = 262_139
"""A prime: the rows of a matrix have thresholds of their own, however wide it is."""
_BLOCK = 4
"""Periods that are computed at a time: they stay in a cache."""


def copy_weights(weights: Tensor, out: Tensor) -> Tensor:
    """Fill `out`, of the same shape. Where that means rounding to bfloat16, by the thresholds of each place."""
    if out.dtype != torch.bfloat16 or weights.dtype == torch.bfloat16:
        return out.copy_(weights)
    if not out.is_contiguous() or out.device != weights.device:
        return out.copy_(rounded(weights))
    _round(weights.float().contiguous().view(-1), out.view(-1))
    return out


def rounded(weights: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same as a new tensor; itself where nothing changes."""
    if weights.dtype == dtype:
        return weights
    return copy_weights(weights, torch.empty(weights.shape, dtype=dtype, device=weights.device))


def _round(weights: Tensor, out: Tensor) -> None:
    """A float32 number and its bfloat16 neighbour towards zero share their upper half; the lower half says how far it
    is on its way to the next. Adding 2**16 minus the threshold carries over when it is passed."""
    bits, halves, steps = weights.view(torch.int32), out.view(torch.int16), _steps(weights.device)
    whole = bits.numel() // _PERIOD * _PERIOD
    sums = torch.empty(min(_BLOCK, whole // _PERIOD) * _PERIOD, dtype=torch.int32, device=weights.device)
    for start in range(0, whole, _BLOCK * _PERIOD):
        block = slice(start, min(start + _BLOCK * _PERIOD, whole))
        rows = bits[block].view(-1, _PERIOD)
        added = torch.add(rows, steps, out=sums[: rows.numel()].view(-1, _PERIOD))
        halves[block].copy_(added.bitwise_right_shift_(16).view(-1))
    left = bits[whole:]
    halves[whole:].copy_((left + steps[: left.numel()]).bitwise_right_shift_(16))


@functools.cache
def _steps(device: torch.device) -> Tensor:
    """Of every place, 0 to 2**16 - 1. Raw bits of PCG64, which no version of numpy changes."""
    drawn = np.random.PCG64(0).random_raw(_PERIOD) >> np.uint64(48)
    return torch.from_numpy(drawn.astype(np.int32)).to(device)
