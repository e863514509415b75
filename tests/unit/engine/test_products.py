"""Packed and plain products are the same numbers; which of them an engine has is told by what it was asked and can."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.torch_engine.products import (
    MixedProducts,
    PackedProducts,
    PlainProducts,
    Products,
    choose_products,
    packed_where_faster,
)
from penstock.models.bfloat16 import has_fast_products
from penstock.models.packing import can_pack

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1}
DTYPES = [dtype for dtype in ROUNDING if can_pack(dtype)]


def chosen(dtype: torch.dtype, *, deterministic: bool = False) -> Products:
    return choose_products(dtype, torch.device("cpu"), deterministic=deterministic)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_packed_products_are_those_of_the_plain_matrices(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(rows, 48), torch.randn(96)
    matrices = [torch.randn(96, 48).to(dtype), torch.randn(200, 48).to(dtype)]
    plain, packed = chosen(dtype), PackedProducts()
    packed.adopt(matrices)
    matrices[0].mul_(2)
    packed.adopt(matrices)  # what is in them has changed
    tolerance = {"atol": ROUNDING[dtype], "rtol": 0.02 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(packed.apply(x, matrices[0], bias), plain.apply(x, matrices[0], bias), **tolerance)
    sums = [torch.ones(rows, 96) for _ in range(2)]
    packed.add(sums[0], x, matrices[0], bias)
    plain.add(sums[1], x, matrices[0], bias)
    torch.testing.assert_close(sums[0], sums[1], **tolerance)
    logits = [torch.empty(rows, 200) for _ in range(2)]
    packed.head(x, matrices[1], logits[0])
    plain.head(x, matrices[1], logits[1])
    torch.testing.assert_close(logits[0], logits[1], **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_are_packed_when_that_is_asked_for_and_never_in_a_deterministic_run(dtype: torch.dtype) -> None:
    matrices = [torch.randn(32, 16).to(dtype)]

    def taken(packed: bool | None, *, deterministic: bool = False) -> type:
        products = chosen(dtype, deterministic=deterministic)
        return type(packed_where_faster(products, matrices, packed=packed, deterministic=deterministic))

    plain = type(chosen(dtype))
    assert taken(True) is (PackedProducts if dtype == torch.float32 or not has_fast_products() else MixedProducts)
    assert taken(False) is plain
    assert taken(None) is plain, "so few stay in the caches"
    assert taken(True, deterministic=True) is PlainProducts


def test_bfloat16_matrices_are_not_packed_where_the_products_of_amx_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.torch_engine.products.has_fast_products", lambda: True)
    matrices = [torch.randn(32, 16).bfloat16()]
    assert type(packed_where_faster(chosen(torch.bfloat16), matrices, packed=True)) is MixedProducts


def test_hidden_states_beside_bfloat16_matrices_are_float32_but_in_a_deterministic_run() -> None:
    products, hidden = chosen(torch.bfloat16), torch.ones(2, 32)
    products.add(hidden, torch.full((2, 16), 2.0**-12), torch.ones(32, 16).bfloat16(), None)
    assert (hidden == 1 + 2.0**-8).all(), "bfloat16 has no such number"
    assert products.dtype == PackedProducts.dtype == torch.float32
    assert chosen(torch.bfloat16, deterministic=True).dtype == torch.bfloat16
