"""How hidden states are multiplied with weights, by dtype and machine: three ways, chosen once.

On a CPU bfloat16 is what matrices are made of and what products read; hidden states stay float32 between them, which
costs nothing beside the products. Queries, keys and values are rounded to bfloat16 for attention and in the cache: half
the memory, and half of what a step reads of it. The trainer's attention is float32; of the mismatch between the two,
small as it is, the cache is less than a third (k3 is 7.0e-5 for SmolLM2-135M, 4.9e-5 with a float32 cache).

torch's own products of few rows spend much of their time on bringing the matrix into the order that their kernel reads.
Where that is worth a copy of the weights, tried on this machine, they are kept in that order beside those that are
loaded (`models/packing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.models.arithmetic import shortest
from penstock.models.bfloat16 import product
from penstock.models.packing import ROWS, WORTH_PACKING, Packing, packing_for

BETTER = 0.95
_TRIED_ROWS_OF_HEAD = 8192


class Products(Protocol):
    dtype: torch.dtype
    """Of hidden states, norms and biases. Keys and values have the dtype of the matrices."""

    def adopt(self, matrices: Sequence[Tensor]) -> None:
        """These are what will be multiplied with; called again when what is in them has changed."""
        ...

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (tokens x in) through a linear layer (out x in)."""
        ...

    def head(self, x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        """The same without bias: into `logits`, which is float32, or into memory of its own."""
        ...


class PlainProducts:
    """torch's own, in the dtype of the weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def adopt(self, matrices: Sequence[Tensor]) -> None:
        pass

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def head(self, x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        if self.dtype == torch.float32:
            return torch.mm(x, weight.t(), out=logits)
        return logits.copy_(torch.mm(x, weight.t()))


class PackedProducts:
    """From copies of the matrices in the order of the kernels; hidden states are float32."""

    dtype = torch.float32

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._packed: dict[Tensor, Tensor] = {}
        """By the matrix itself, not by what is in it."""

    def adopt(self, matrices: Sequence[Tensor]) -> None:
        for matrix in matrices:  # one after the other: old and new copies never both exist as a whole
            self._packed[matrix] = self._packing.pack(matrix)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = self.head(x, weight, torch.empty(len(x), len(weight), dtype=torch.float32))
        return out if bias is None else out + bias

    def head(self, x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return self._packing.multiply(x.to(weight.dtype), self._packed[weight], logits)


class MixedProducts:
    """bfloat16 matrices, float32 hidden states, norms and biases."""

    dtype = torch.float32

    def adopt(self, matrices: Sequence[Tensor]) -> None:
        pass

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = product(x.bfloat16(), weight.t())
        return out if bias is None else out.add_(bias)

    def head(self, x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return product(x.bfloat16(), weight.t(), logits)


def choose_products(dtype: torch.dtype, device: torch.device, *, deterministic: bool) -> Products:
    # MKL does not promise the same bits for the same row among other rows; torch's way is tested for that.
    if dtype == torch.bfloat16 and device.type == "cpu" and not deterministic:
        return MixedProducts()
    return PlainProducts(dtype)


def packed_where_faster(
    products: Products, matrices: Sequence[Tensor], *, packed: bool | None = None, deterministic: bool = False
) -> Products:
    """These products, or those with packed matrices, where they do the same in less time; either has adopted them.

    `matrices` are those of a model, the last one its output embedding. Who else is on the machine decides too, so two
    engines of one model may choose differently: deterministic runs pack nothing. `packed` is what was asked for.
    """
    can = products.dtype == torch.float32 and not deterministic and matrices[0].device.type == "cpu"
    depths = [matrix.shape[1] for matrix in matrices]
    packing = packing_for(matrices[0].dtype, depths) if can and packed is not False else None
    if packing is not None and (packed or _packing_pays(products, PackedProducts(packing), matrices)):
        products = PackedProducts(packing)
    products.adopt(matrices)
    return products


def _packing_pays(plain: Products, packed: Products, matrices: Sequence[Tensor]) -> bool:
    if sum(matrix.nbytes for matrix in matrices) not in WORTH_PACKING:
        return False
    sample = [*matrices[:4], matrices[-1][:_TRIED_ROWS_OF_HEAD]]

    def round_of(products: Products) -> Callable[[], None]:
        states = [torch.full((ROWS, matrix.shape[1]), 0.01, dtype=plain.dtype) for matrix in sample]

        def run() -> None:
            for x, matrix in zip(states, sample, strict=True):
                products.apply(x, matrix, None)

        return run

    with torch.inference_mode():
        packed.adopt(sample)
        seconds = shortest({"plain": round_of(plain), "packed": round_of(packed)})
    return seconds["packed"] <= BETTER * seconds["plain"]
