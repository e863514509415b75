"""Linear layers with a backward pass of their own: bfloat16 products where they are fast, gradients added in place.

In bfloat16 a layer keeps a rounded copy of its weights (as `models.rounding` makes it), and only the operands of a
product are rounded: sums, results and gradients are float32. A weight's gradient is added into its `.grad` by the
product that makes it, without a temporary of the weight's size.

A layer with an adapter keeps a copy with the adapter in it, which is what the engine multiplies with too. It has no
gradient of its own then; with g that of the outputs y = (W + s B A) x, those of the adapter are

    d B = s g^T (x A^T)        d A = s (g B)^T x

which are products as narrow as the adapter; those with x are one for layers side by side. What is frozen costs no
gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear

from penstock.learn.lora import Adapter, adapter_of, base_of
from penstock.models.bfloat16 import product
from penstock.models.rounding import copy_weights


class Gradients:
    """Where `.grad` lies: the same memory in every step, because fresh pages for it cost as much as filling them."""

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] = {}

    def add_product(self, parameter: Tensor, a: Tensor, b: Tensor) -> None:
        """parameter.grad += a @ b."""
        if parameter.grad is None:
            parameter.grad = multiply(a, b, self._memory(parameter))
        else:
            multiply(a, b, parameter.grad, add=True)

    def add(self, parameter: Tensor, values: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = self._memory(parameter).copy_(values)
        else:
            parameter.grad.add_(values)

    def add_rows(self, parameter: Tensor, rows: Tensor, values: Tensor) -> None:
        """parameter.grad[rows] += values; a row may come more than once."""
        if parameter.grad is None:
            parameter.grad = self._memory(parameter).zero_()
        parameter.grad.index_add_(0, rows, values)

    def clear(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def zero(self, parameters: Iterable[Tensor]) -> None:
        """The gradient of a loss that no weight changes."""
        for parameter in parameters:
            parameter.grad = self._memory(parameter).zero_()

    def _memory(self, parameter: Tensor) -> Tensor:
        if parameter not in self._kept:
            self._kept[parameter] = torch.empty_like(parameter, requires_grad=False)
        return self._kept[parameter]


class Spare:
    """Memory of large tables, kept for the next ones by whoever is done with them: fresh pages, as in `Gradients`."""

    MOST = 3

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A table with anything in it, that nobody else has until it is given back. One that is not is forgotten."""
        number = rows * columns
        fitting = [memory for memory in self._free if memory.dtype == dtype and memory.numel() >= number]
        if fitting:
            memory = min(fitting, key=Tensor.numel)
            self._free = [other for other in self._free if other is not memory]
        else:
            self._free = self._free[1:]  # what is too small now would be again
            with torch.inference_mode(False):
                memory = torch.empty(number, dtype=dtype, device=device)
        return memory[:number].view(rows, columns)

    def give_back(self, table: Tensor) -> None:
        whole = table.untyped_storage().nbytes() // table.element_size()
        self._free = [*self._free, table.detach().as_strided((whole,), (1,), 0)][-self.MOST :]


class JoinedLinear:
    """Linear layers that read the same input, their outputs side by side."""

    def __init__(self, layers: list[Any], dtype: torch.dtype, gradients: Gradients, *, adapted: bool = True) -> None:
        """Without `adapted` the layers are taken without their adapters."""
        self.dtype = dtype
        """Of the operands: bfloat16, or that of the weights."""
        self._layers: list[Linear] = [base_of(layer) for layer in layers]
        self._adapters: list[Adapter | None] = [adapter_of(layer) if adapted else None for layer in layers]
        self._gradients = gradients
        self.spare = Spare()
        """For tables as wide as its outputs."""
        ends = torch.tensor([layer.out_features for layer in layers]).cumsum(0).tolist()
        self._columns = [slice(end - layer.out_features, end) for layer, end in zip(layers, ends, strict=True)]
        self._copy: Tensor | None = None
        """What is multiplied with where that is not the weights themselves: rounded, or with an adapter in it."""
        if dtype == torch.bfloat16 or any(self._adapters):
            self._copy = torch.empty(ends[-1], layers[0].in_features, dtype=dtype)
        self.out_features: int = ends[-1]

    def refresh(self) -> None:
        """Take the weights as they are now."""
        if self._copy is None:
            return
        for layer, adapter, columns in zip(self._layers, self._adapters, self._columns, strict=True):
            weight, copy = layer.weight.detach(), self._copy[columns]
            if adapter is None:
                copy_weights(weight, copy)
            elif copy.dtype == weight.dtype:
                adapter.added_to(weight, copy)
            else:
                copy_weights(adapter.added_to(weight), copy)

    def drop_originals(self) -> None:
        """Free the weights themselves where a copy is what is read."""
        if self._copy is not None:
            for layer in self._layers:
                layer.weight.data = layer.weight.new_empty(0)

    def forward(self, x: Tensor, add_to: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [tokens, in] of this layer's dtype -> float32 [tokens, out], written to `out`; or added to `add_to`."""
        if add_to is not None:
            out = add_to
        elif out is None:
            out = x.new_empty(len(x), self.out_features, dtype=self._result_dtype)
        if self._copy is not None:
            multiply(x, self._copy.t(), out, add=add_to is not None)
        for layer, columns in zip(self._layers, self._columns, strict=True):
            if self._copy is None:
                multiply(x, layer.weight.detach().t(), out[:, columns], add=add_to is not None)
            if layer.bias is not None:
                out[:, columns] += layer.bias.detach()
        return out

    def backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of x; those of weights and biases are added where they belong."""
        rounded = grad.to(self.dtype)
        self.add_gradient(rounded, x)
        for layer, columns in zip(self._layers, self._columns, strict=True):
            if layer.bias is not None and layer.bias.requires_grad:
                self._gradients.add(layer.bias, grad[:, columns].sum(0))
        return self.multiply_back(rounded)

    def add_gradient(self, grad: Tensor, x: Tensor) -> None:
        """Of the weights, from [tokens, out] and [tokens, in] of this layer's dtype."""
        adapted = []
        for layer, adapter, columns in zip(self._layers, self._adapters, self._columns, strict=True):
            if adapter is not None:
                adapted.append((adapter, grad[:, columns]))
            elif layer.weight.requires_grad:
                self._gradients.add_product(layer.weight, grad[:, columns].t(), x)
        if adapted:
            self._add_adapter_gradients(adapted, x)

    def _add_adapter_gradients(self, adapted: list[tuple[Adapter, Tensor]], x: Tensor) -> None:
        """Of adapters that read the same x, with the gradients of their layers' outputs."""
        rows = torch.cat([adapter.a.detach() for adapter, _ in adapted])
        ends = torch.tensor([len(adapter.a) for adapter, _ in adapted]).cumsum(0).tolist()
        places = [slice(end - len(adapter.a), end) for end, (adapter, _) in zip(ends, adapted, strict=True)]
        inner = multiply(x, rows.t().to(x.dtype))
        back = torch.empty_like(inner)
        for place, (adapter, grad) in zip(places, adapted, strict=True):
            multiply(grad, adapter.b.detach().to(x.dtype), back[:, place])
            self._gradients.add_product(adapter.b, grad.t(), inner[:, place].mul_(adapter.scale).to(x.dtype))
            back[:, place] *= adapter.scale
        whole = multiply(back.to(x.dtype).t(), x)
        for place, (adapter, _) in zip(places, adapted, strict=True):
            self._gradients.add(adapter.a, whole[place])

    def multiply_back(self, rounded: Tensor) -> Tensor:
        """[tokens, out] of this layer's dtype times the weights: [tokens, in]."""
        if self._copy is not None:
            return multiply(rounded, self._copy)
        first, *others = zip(self._layers, self._columns, strict=True)
        result = multiply(rounded[:, first[1]], first[0].weight.detach())
        for layer, columns in others:
            multiply(rounded[:, columns], layer.weight.detach(), result, add=True)
        return result

    @property
    def weight(self) -> Tensor:
        """Of the first, which is the only one where this is asked."""
        return self._layers[0].weight

    @property
    def _result_dtype(self) -> torch.dtype:
        return self._layers[0].weight.dtype


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """a @ b, written or added to `out`; of bfloat16 the result is float32."""
    if a.dtype == torch.bfloat16:
        return product(a, b, out, add=add)
    if out is None:
        return torch.mm(a, b)
    return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
