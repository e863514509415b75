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
from penstock.models.kernels import kernels
from penstock.models.packing import OneDnn, Packing, Panels, packing_for

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1}
DTYPES = [dtype for dtype in ROUNDING if has_fast_products() or packing_for(dtype, ()) is not None]


def chosen(dtype: torch.dtype, *, deterministic: bool = False) -> Products:
    return choose_products(dtype, torch.device("cpu"), deterministic=deterministic)


def packings(dtype: torch.dtype) -> list[Packing]:
    """Every one that works here, the engine's last."""
    usual = packing_for(dtype, ())
    return [OneDnn(), usual] if isinstance(usual, Panels) else [usual] if usual is not None else []


PACKINGS = [(dtype, packing) for dtype in DTYPES for packing in packings(dtype)]


@pytest.mark.parametrize(("dtype", "packing"), PACKINGS)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_packed_products_are_those_of_the_plain_matrices(dtype: torch.dtype, packing: Packing, rows: int) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(rows, 48), torch.randn(96)
    matrices = [torch.randn(96, 48).to(dtype), torch.randn(200, 48).to(dtype)]
    plain, packed = chosen(dtype), PackedProducts(packing)
    packed.adopt(matrices)
    matrices[0].mul_(2)
    packed.adopt(matrices)  # what is in them has changed
    tolerance = {"atol": ROUNDING[dtype], "rtol": 0.02 if dtype == torch.bfloat16 else 1e-5}
    ours, theirs = packed.apply(x, matrices[0], bias).float(), plain.apply(x, matrices[0], bias)
    torch.testing.assert_close(ours, theirs, **tolerance)
    logits = [products.head(x, matrices[1], torch.empty(rows, 200)).float() for products in (packed, plain)]
    torch.testing.assert_close(*logits, **tolerance)


def test_bfloat16_matrices_lie_in_panels_where_what_was_compiled_multiplies() -> None:
    compiled = kernels()
    if compiled is None or not compiled.multiplies or has_fast_products():
        pytest.skip("nothing was compiled for this processor's bfloat16 instructions, or it has AMX")
    matrices = [torch.randn(32, 16).bfloat16()]
    products = packed_where_faster(chosen(torch.bfloat16), matrices, packed=True)
    x = torch.full((1, 16), 2.0**-12)
    exact = (x @ matrices[0].float().t()) * 1.0
    torch.testing.assert_close(products.apply(x, matrices[0], None), exact, atol=0, rtol=1e-5)
    assert isinstance(packing_for(torch.bfloat16, [16, 576]), Panels)
    assert isinstance(packing_for(torch.bfloat16, [16, 575]), OneDnn), "pairs are multiplied"


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
    monkeypatch.setattr("penstock.models.packing.has_fast_products", lambda: True)
    matrices = [torch.randn(32, 16).bfloat16()]
    assert type(packed_where_faster(chosen(torch.bfloat16), matrices, packed=True)) is MixedProducts


def test_hidden_states_beside_bfloat16_matrices_are_float32_but_in_a_deterministic_run() -> None:
    products, bias = chosen(torch.bfloat16), torch.ones(32)
    found = products.apply(torch.full((2, 16), 2.0**-12), torch.ones(32, 16).bfloat16(), bias)
    assert (found == 1 + 2.0**-8).all(), "bfloat16 has no such number"
    assert products.dtype == PackedProducts.dtype == torch.float32
    assert chosen(torch.bfloat16, deterministic=True).dtype == torch.bfloat16
