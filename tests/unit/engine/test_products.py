"""Packed and plain products are the same numbers; which of them an engine has is told by what it was asked and can."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.torch_engine.attention import SHORT, attend
from penstock.engine.torch_engine.products import MixedProducts, PackedProducts, PlainProducts, packed_where_faster
from penstock.models.packing import can_pack

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1}
DTYPES = [dtype for dtype in ROUNDING if can_pack(dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_packed_products_are_those_of_the_plain_matrices(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(rows, 48).to(dtype), torch.randn(96).to(dtype)
    matrices = [torch.randn(96, 48).to(dtype), torch.randn(200, 48).to(dtype)]
    plain, packed = PlainProducts(dtype), PackedProducts(dtype)
    packed.adopt(matrices)
    matrices[0].mul_(2)
    packed.adopt(matrices)  # what is in them has changed
    tolerance = {"atol": ROUNDING[dtype], "rtol": 0.02 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(packed.apply(x, matrices[0], bias), plain.apply(x, matrices[0], bias), **tolerance)
    sums = [torch.ones(rows, 96, dtype=dtype) for _ in range(2)]
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

    def chosen(packed: bool | None, *, deterministic: bool = False) -> type:
        return type(packed_where_faster(PlainProducts(dtype), matrices, packed=packed, deterministic=deterministic))

    assert chosen(True) is PackedProducts
    assert chosen(False) is PlainProducts
    assert chosen(None) is PlainProducts, "so few stay in the caches"
    assert chosen(True, deterministic=True) is PlainProducts


def test_products_of_two_dtypes_are_never_packed() -> None:
    matrices = [torch.randn(32, 16).bfloat16()]
    assert type(packed_where_faster(MixedProducts(), matrices, packed=True)) is MixedProducts


@pytest.mark.parametrize("length", [32, SHORT, SHORT + 32])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_over_few_cached_tokens_is_what_it_is_over_many(length: int, scale: float | None) -> None:
    torch.manual_seed(length)
    query = torch.randn(3, 2, 4, 16)
    keys, values = torch.randn(3, 2, length + 32, 16)[:, :, :length], torch.randn(3, 2, length + 32, 16)[:, :, :length]
    hidden = torch.arange(length) > torch.tensor([0, 7, length - 1])[:, None]
    mask = torch.zeros(3, 1, 1, length).masked_fill_(hidden[:, None, None], -torch.inf)
    scores = torch.einsum("nkgd,nkld->nkgl", query, keys).double() * (0.25 if scale is None else scale) + mask
    expected = torch.einsum("nkgl,nkld->nkgd", scores.softmax(-1), values.double())
    torch.testing.assert_close(attend(query, keys, values, mask, scale), expected.float(), atol=1e-5, rtol=1e-5)
