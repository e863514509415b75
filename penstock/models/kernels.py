"""What is compiled, `kernels.c`: when Penstock is installed where there is a C compiler, for each kind of processor.

It computes in float32; keys and values, and what comes from a product or goes into one, may be bfloat16. Everything
lies on the CPU, in one piece; what is normed, gated and attended to, in whole vectors of 16 numbers. Sums are made in
another order than torch's, so deterministic runs do without it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib

import torch
from torch import Tensor

VECTOR = 16
"""Numbers: what is normed and gated is as wide as some of them, and half a head is."""
BLOCK = 128
"""Logits that are summed together."""
PANEL = 48
"""Columns of a product that are computed together."""
_VERSION = 3
"""Of `kernels.c`."""
KINDS = {"avx512": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "fma3"), "avx2": ("avx2", "fma3")}
"""What it is compiled for, the best first, and what torch calls what a processor must have for that."""


class Kernels:
    def __init__(self, library: ctypes.CDLL, *, bfloat16: bool = False) -> None:
        """`bfloat16` is whether the processor has instructions for its products."""
        address, number, flag, size = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_int64
        threads = ctypes.c_int
        library.penstock_norm.argtypes = [address, address, flag, address, number, address, flag, size, size, threads]
        library.penstock_gated.argtypes = [address, flag, address, flag, size, size, threads]
        library.penstock_sum_blocks.argtypes = [address, flag, address, address, size, size, threads]
        library.penstock_attend.argtypes = [ctypes.POINTER(_Attention), threads]
        library.penstock_multiply.argtypes = [address, address, address, size, size, size, threads]
        library.penstock_multiply.restype = None
        self.multiplies = bfloat16 and bool(library.penstock_multiplies())
        """Whether `product` may be called."""
        library.penstock_norm.restype = library.penstock_gated.restype = None
        self._library = library

    def norm(self, hidden: Tensor, more: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """Adds `more` to `hidden`, which must lie in one piece. The root mean square of each row is 1, then times
        `weight`; in `dtype`."""
        x = None if more is None else more.contiguous()
        out = torch.empty(hidden.shape, dtype=dtype)
        self._library.penstock_norm(
            hidden.data_ptr(), None if x is None else x.data_ptr(), x is not None and _is_half(x),
            weight.data_ptr(), eps, out.data_ptr(), _is_half(out), *hidden.shape, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gated(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        """silu of the left half of each row times the right one, in `dtype`."""
        x, out = gate_up.contiguous(), torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=dtype)
        self._library.penstock_gated(
            x.data_ptr(), _is_half(x), out.data_ptr(), _is_half(out), *out.shape, torch.get_num_threads()
        )
        return out

    def panels(self, matrix: Tensor) -> Tensor:
        """A copy of out x in (bfloat16, an even number in) for `product`: whole panels of its columns, where pairs of
        numbers lie column by column."""
        width, pairs = matrix.shape[0], matrix.shape[1] // 2
        whole = width - width % PANEL
        panels = torch.zeros(-(-width // PANEL), pairs, PANEL, dtype=torch.int32)
        bits = matrix.contiguous()
        bits = (bits.clone() if bits.storage_offset() % 2 else bits).view(torch.int32)
        panels[: whole // PANEL] = bits[:whole].view(-1, PANEL, pairs).transpose(1, 2)
        if width > whole:
            panels[-1, :, : width - whole] = bits[whole:].t()
        return panels

    def product(self, x: Tensor, panels: Tensor, out: Tensor) -> Tensor:
        """x (rows x in, bfloat16) through a matrix that lies in panels, into `out` (rows x out, float32)."""
        rows, pairs = x.shape[0], panels.shape[1]
        if not rows:
            return out
        if x.shape[1] != 2 * pairs or len(out) != rows or not 0 <= len(panels) * PANEL - out.shape[1] < PANEL:
            raise ValueError(f"{tuple(x.shape)} times panels {tuple(panels.shape)} into {tuple(out.shape)}")
        if x.dtype != torch.bfloat16 or out.dtype != torch.float32 or not out.is_contiguous():
            raise TypeError(f"a product of {x.dtype} into {out.dtype} in steps of {out.stride()}")
        x = x.contiguous()
        self._library.penstock_multiply(
            x.data_ptr(), panels.data_ptr(), out.data_ptr(), rows, pairs, out.shape[1], torch.get_num_threads()
        )
        return out

    def sum_blocks(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row, the sum of exp(logits - max) of each `BLOCK`, and the max; in float32."""
        rows, width = logits.shape
        x = logits.contiguous()
        sums = torch.empty(rows, -(-width // BLOCK), dtype=torch.float32)
        top = torch.empty(rows, dtype=torch.float32)
        if self._library.penstock_sum_blocks(
            x.data_ptr(), _is_half(x), sums.data_ptr(), top.data_ptr(), rows, width, torch.get_num_threads()
        ):
            raise MemoryError(f"no memory for the sums of {width} logits")
        return sums, top

    def attend(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: Tensor | None,
        eps: float,
    ) -> Tensor:
        """One new token per slot, at its position: its key and value go into the cache, its queries read that so far.

        qkv n x (h + 2 kv) x d, keys (turned, see `LayerShape`) and values n x kv x L x d, cos and sin of all positions,
        norms 2 x d or none. n x (h * d), in the dtype of keys and values. Positions must lie within L; L and d must be
        whole pairs of vectors.
        """
        n, kv_heads, length, d = values.shape
        turned = (kv_heads * length * d, length * d, 1, length)
        if keys.shape != values.shape or keys.stride() != turned or not values.is_contiguous():
            raise ValueError(f"keys {tuple(keys.shape)} in steps of {keys.stride()}, values {tuple(values.shape)}")
        if length % (2 * VECTOR) or d % (2 * VECTOR):
            raise ValueError(f"{length} tokens of {d} numbers; both must be divisible by {2 * VECTOR}")
        heads = qkv.shape[1] - 2 * kv_heads
        x, at, out = qkv.contiguous(), positions.contiguous(), torch.empty(n, heads * d, dtype=values.dtype)
        asked = _Attention(
            qkv=x.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            out=out.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            norms=None if norms is None else norms.data_ptr(),
            positions=at.data_ptr(),
            eps=eps,
            scale=d**-0.5,
            qkv_bf16=_is_half(x),
            bf16=_is_half(out),
            n=n,
            heads=heads,
            kv_heads=kv_heads,
            d=d,
            length=length,
        )
        if self._library.penstock_attend(ctypes.byref(asked), torch.get_num_threads()):
            raise MemoryError(f"no memory for the scores of {length} tokens")
        return out


@functools.cache
def kernels() -> Kernels | None:
    """The best for this processor of those that were compiled."""
    return next((found for kind in kinds() if (found := load(kind)) is not None), None)


def kinds() -> list[str]:
    """What this processor could use, the best first."""
    can = torch.cpu.get_capabilities()
    return [kind for kind, needed in KINDS.items() if all(can.get(each) for each in needed)]


def load(kind: str) -> Kernels | None:
    """torch is loaded before it: both then have one team of OpenMP threads."""
    try:
        module = importlib.import_module(f"penstock.models._kernels_{kind}")
        library = ctypes.CDLL(str(module.__file__))
    except (ImportError, OSError):
        return None
    # What an older checkout compiled is not called: it would read other arguments.
    if library.penstock_version() != _VERSION:
        return None
    return Kernels(library, bfloat16=bool(torch.cpu.get_capabilities().get("avx512_bf16")))


class _Attention(ctypes.Structure):
    """`struct attention` of kernels.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "keys", "values", "out", "cos", "sin", "norms", "positions")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, ctypes.c_int) for name in ("qkv_bf16", "bf16")),
        *((name, ctypes.c_int64) for name in ("n", "heads", "kv_heads", "d", "length")),
    )


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16
