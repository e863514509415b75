"""What a step does between its matrix products: norms, gates, positions, and attention of one new token per slot.

torch's operations do it everywhere; what was compiled (`kernels.py`) does it in a fraction of the time, where its
vectors fit the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.torch_engine.attention import attend, attend_in_blocks, decode_mask
from penstock.engine.torch_engine.cache import SlotCache
from penstock.models.kernels import VECTOR, Kernels, kernels

AttendSlots = Callable[[int, Tensor, Tensor | None], Tensor]
"""Of a layer: its q, k and v side by side, tokens x heads x d, and the weights of its q and k norm, if it has them. The
new keys and values go into the cache; what comes out is tokens x (heads * d)."""


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    """Of norms."""


class Rope(NamedTuple):
    """Of every position; `sin` carries the sign of the rotation. Each positions x 1 x d."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> Rope:
        return Rope(self.cos[positions], self.sin[positions])


class Between:
    """By torch's operations."""

    turned_keys = False
    """Of the cache that `attention` wants; see `LayerShape`."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, *, deterministic: bool) -> None:
        """`dtype` is that of matrices, keys and values."""
        self._shape = shape
        self._dtype = dtype
        self._deterministic = deterministic
        self._norm_of_head = torch.tensor([0] * shape.heads + [1] * shape.kv_heads, device=device)

    def norm(self, hidden: Tensor, more: Tensor | None, weight: Tensor) -> Tensor:
        """Of `hidden`, to which `more` is added first, in place."""
        if more is not None:
            hidden += more
        return F.rms_norm(hidden, weight.shape, weight, self._shape.eps)

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotated(self, qkv: Tensor, qk_norm: Tensor | None, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of tokens, whose positions `rope` is at."""
        heads, both = self._shape.heads, self._shape.heads + self._shape.kv_heads
        qk = qkv[:, :both]
        if qk_norm is not None:
            qk = F.rms_norm(qk, (self._shape.head_dim,), None, self._shape.eps) * qk_norm[self._norm_of_head]
        # sin carries the sign of rotate_half, so the rotation is a roll.
        qk = torch.addcmul(qk * rope.cos, qk.roll(self._shape.head_dim // 2, -1), rope.sin).to(self._dtype)
        return qk[:, :heads], qk[:, heads:], qkv[:, both:].to(self._dtype)

    def attention(self, cache: SlotCache, slots: slice, positions: Tensor, rope: Rope, length: int) -> AttendSlots:
        """For one new token of each of these slots; `length` of the cache is read."""
        n, here = len(positions), rope.at(positions)
        rows = torch.arange(n, device=positions.device)
        way = attend_in_blocks if self._deterministic else attend
        mask = decode_mask(positions, length, torch.float32 if self._deterministic else self._dtype)

        def attend_slots(layer: int, qkv: Tensor, qk_norm: Tensor | None) -> Tensor:
            query, key, value = self.rotated(qkv, qk_norm, here)
            keys, values = cache.keys[layer][slots], cache.values[layer][slots]
            keys[rows, :, positions] = key
            values[rows, :, positions] = value
            folded = query.reshape(n, self._shape.kv_heads, -1, self._shape.head_dim)
            return way(folded, keys[:, :, :length], values[:, :, :length], mask).reshape(n, -1)

        return attend_slots


class CompiledBetween(Between):
    """By what was compiled. What comes out is in the dtype of matrices, which the next product reads."""

    turned_keys = True

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, compiled: Kernels) -> None:
        super().__init__(shape, dtype, device, deterministic=False)
        self.kernels = compiled

    def norm(self, hidden: Tensor, more: Tensor | None, weight: Tensor) -> Tensor:
        return self.kernels.norm(hidden, more, weight, self._shape.eps, self._dtype)

    def gated(self, gate_up: Tensor) -> Tensor:
        return self.kernels.gated(gate_up, self._dtype)

    def attention(self, cache: SlotCache, slots: slice, positions: Tensor, rope: Rope, length: int) -> AttendSlots:
        first, last, room = int(positions.min()), int(positions.max()), cache.values[-1].shape[2]
        if first < 0 or last >= room:
            raise IndexError(f"positions from {first} to {last} in a cache of {room} tokens")

        def attend_slots(layer: int, qkv: Tensor, qk_norm: Tensor | None) -> Tensor:
            keys, values = cache.keys[layer][slots], cache.values[layer][slots]
            return self.kernels.attend(qkv, keys, values, positions, rope.cos, rope.sin, qk_norm, self._shape.eps)

        return attend_slots


def choose_between(
    shape: Shape,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    hidden_dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool,
) -> Between:
    """`widths` are those of what is normed and gated."""
    fits = shape.head_dim % (2 * VECTOR) == 0 and all(width % VECTOR == 0 for width in widths)
    types = hidden_dtype == torch.float32 and dtype in (torch.float32, torch.bfloat16)
    if fits and types and device.type == "cpu" and not deterministic and (compiled := kernels()) is not None:
        return CompiledBetween(shape, dtype, device, compiled)
    return Between(shape, dtype, device, deterministic=deterministic)
