"""How hidden states are multiplied with weights, by dtype and machine: two ways, chosen once.

Where bfloat16 products with float32 sums are fast, the matrices are bfloat16 and hidden states stay float32, which
costs little beside the products and loses nothing between them. Queries, keys and values are rounded to bfloat16 for
attention and in the cache, as with plain products: half the memory, and half of what a step reads of it. The trainer's
attention is float32; of the mismatch between the two, small as it is, the cache is less than a third (k3 is 7.0e-5
for SmolLM2-135M, 4.9e-5 with a float32 cache).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.models.bfloat16 import has_fast_products, product


class Products(Protocol):
    dtype: torch.dtype
    """Of hidden states, norms and biases. Keys and values have the dtype of the matrices."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (tokens x in) through a linear layer (out x in)."""
        ...

    def add(self, hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """The same, added to `hidden` in place."""
        ...

    def head(self, x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        """The same without bias, into float32 `logits`."""
        ...


class PlainProducts:
    """torch's own, in the dtype of the weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def add(self, hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        hidden.addmm_(x, weight.t())
        if bias is not None:
            hidden += bias

    def head(self, x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        if self.dtype == torch.float32:
            return torch.mm(x, weight.t(), out=logits)
        return logits.copy_(torch.mm(x, weight.t()))


class MixedProducts:
    """bfloat16 matrices, float32 hidden states, norms and biases."""

    dtype = torch.float32

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = product(x.bfloat16(), weight.t())
        return out if bias is None else out.add_(bias)

    def add(self, hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        product(x.bfloat16(), weight.t(), hidden, add=True)
        if bias is not None:
            hidden += bias

    def head(self, x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return product(x.bfloat16(), weight.t(), logits)


def choose_products(dtype: torch.dtype, device: torch.device, *, deterministic: bool) -> Products:
    # MKL does not promise the same bits for the same row among other rows; torch's way is tested for that.
    if dtype == torch.bfloat16 and device.type == "cpu" and has_fast_products() and not deterministic:
        return MixedProducts()
    return PlainProducts(dtype)
