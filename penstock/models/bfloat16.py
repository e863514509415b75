"""Matrix products of bfloat16 with float32 sums and results, by the fastest way this CPU has.

torch gives such products to oneDNN. MKL, which lies in the same library, has its own, with AMX where the CPU has it and
without rounding the result; torch offers no way to it, so it is called here. Some virtual machines hide the page of
CPUID that describes AMX tiles (leaf 0x1D): MKL works there, oneDNN sets up no tiles and dies of an illegal instruction.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112
_TILE_LEAF = 0x1D
_Gemm = Callable[..., None]


def amx_is_hidden(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine has AMX without its description: other libraries than MKL must not use it then."""
    fields = [line.partition(":") for line in _text(cpuinfo).splitlines()]
    described = {name.strip(): value.strip() for name, _, value in reversed(fields)}
    tiles = "amx_tile" in described.get("flags", "").split()
    return tiles and int(described.get("cpuid level", _TILE_LEAF)) < _TILE_LEAF


def keep_onednn_alive() -> None:
    """Turn AMX off in oneDNN where it would die of it. To be called before its first operation, of any dtype."""
    if amx_is_hidden():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def has_fast_products() -> bool:
    """Whether `product` is MKL's with AMX: several times as fast as float32."""
    return _gemm() is not None


def product(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """a @ b for bfloat16 matrices, summed in float32; `out` (float32) is overwritten, or with `add` added to.

    Rows or columns must lie together in memory, so `weight.t()` costs nothing.
    """
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    gemm = _gemm() if a.device.type == "cpu" else None
    if gemm is None:
        result = torch.mm(a, b)
        if out is None:
            return result.float()
        return out.add_(result) if add else out.copy_(result)
    if out is None:
        out, add = torch.empty(m, n, dtype=torch.float32), False
    _check(a, b, out)
    if out.numel() == 0:
        return out
    if k == 0:
        return out if add else out.zero_()
    a_order, a_step = _order(a)
    b_order, b_step = _order(b)
    gemm(
        _ROW_MAJOR, a_order, b_order, m, n, k,
        1.0, a.data_ptr(), a_step, b.data_ptr(), b_step, 1.0 if add else 0.0, out.data_ptr(), out.stride(0),
    )  # fmt: skip
    return out


def _check(a: Tensor, b: Tensor, out: Tensor) -> None:
    """A wrong shape or dtype here would be memory that is overwritten."""
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16 or out.dtype != torch.float32:
        raise TypeError(f"a product of {a.dtype} and {b.dtype} into {out.dtype}; it takes bfloat16 and gives float32")
    if a.shape[1] != b.shape[0] or out.shape != (a.shape[0], b.shape[1]):
        raise ValueError(f"a product of {tuple(a.shape)} and {tuple(b.shape)} into {tuple(out.shape)}")
    if b.device.type != "cpu" or out.device.type != "cpu" or (out.stride(1) != 1 and out.shape[1] > 1):
        raise ValueError("the result of a product must lie in rows, and everything on the CPU")


def _order(matrix: Tensor) -> tuple[int, int]:
    """How BLAS reads it: in rows or in columns, and how far one is from the next."""
    rows, columns = matrix.shape
    down, right = matrix.stride()
    if right == 1 or columns == 1:
        return _PLAIN, max(down, columns)
    if down == 1 or rows == 1:
        return _TRANSPOSED, max(right, rows)
    raise ValueError(f"neither rows nor columns lie together in memory: strides {matrix.stride()}")


@functools.cache
def _gemm() -> _Gemm | None:
    if platform.system() != "Linux" or not torch.cpu.get_capabilities().get("amx_bf16"):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        gemm = library.cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None  # A torch that was built without MKL, or with another one.
    size, number, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    gemm.argtypes = [size] * 6 + [number, address, size, address, size, number, address, size]
    gemm.restype = None
    found: _Gemm = gemm
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
