"""What is compiled, `kernels.c`: when Penstock is installed where there is a C compiler, for each kind of processor.

It computes in float32; keys and values, and what comes from a product or goes into one, may be bfloat16. Everything
lies on the CPU, in one piece, and in whole vectors of 16 numbers. Its sums are made in another order than torch's, so
deterministic runs do without it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib

import torch
from torch import Tensor

VECTOR = 16
"""Numbers: what is normed and gated is as wide as some of them, and half a head is."""
_VERSION = 1
"""Of `kernels.c`."""
_KINDS = {"avx512": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "fma3"), "avx2": ("avx2", "fma3")}
"""What it is compiled for, the best first, and what torch calls what a processor must have for that."""


class Kernels:
    def __init__(self, library: ctypes.CDLL) -> None:
        address, number, flag, size = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_int64
        threads = ctypes.c_int
        library.penstock_norm.argtypes = [address, address, number, address, flag, size, size, threads]
        library.penstock_gated.argtypes = [address, flag, address, flag, size, size, threads]
        library.penstock_exponentials.argtypes = [address, address, address, address, size, size, size, threads]
        library.penstock_attend.argtypes = [ctypes.POINTER(_Attention), threads]
        library.penstock_norm.restype = library.penstock_gated.restype = library.penstock_exponentials.restype = None
        self._library = library

    def norm(self, hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """The root mean square of each row is 1, then times `weight`; in `dtype`."""
        x, out = hidden.contiguous(), torch.empty(hidden.shape, dtype=dtype)
        self._library.penstock_norm(
            x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), _is_half(out), *x.shape, torch.get_num_threads()
        )
        return out

    def gated(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        """silu of the left half of each row times the right one, in `dtype`."""
        x, out = gate_up.contiguous(), torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=dtype)
        self._library.penstock_gated(
            x.data_ptr(), _is_half(x), out.data_ptr(), _is_half(out), *out.shape, torch.get_num_threads()
        )
        return out

    def exponentials(self, logits: Tensor, weights: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """exp(logits - max) into `weights`, which is as wide as whole blocks, zeros at the end. The sum of each block,
        and the max."""
        rows, width = logits.shape
        sums, top = torch.empty(rows, weights.shape[1] // block), torch.empty(rows)
        x = logits.contiguous()
        self._library.penstock_exponentials(
            *(each.data_ptr() for each in (x, weights, sums, top)), rows, width, block, torch.get_num_threads()
        )
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
        norms 2 x d or none. n x (h * d), in the dtype of keys and values. Positions must lie within L.
        """
        n, kv_heads, length, d = values.shape
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
    """Those for this processor, if they were compiled."""
    can = torch.cpu.get_capabilities()
    kind = next((kind for kind, needed in _KINDS.items() if all(can.get(each) for each in needed)), None)
    return load(kind) if kind is not None else None


def load(kind: str) -> Kernels | None:
    """torch is loaded before it: both then have one team of OpenMP threads."""
    try:
        module = importlib.import_module(f"penstock.engine.torch_engine._kernels_{kind}")
        library = ctypes.CDLL(str(module.__file__))
    except (ImportError, OSError):
        return None
    # What an older checkout compiled is not called: it would read other arguments.
    return Kernels(library) if library.penstock_version() == _VERSION else None


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
