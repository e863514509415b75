"""Attention of one new token over the cache: both ways are the same function, wherever the keys lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.engine.torch_engine import attention
from penstock.engine.torch_engine.attention import attend, attend_by_products, decode_mask, faster_attention
from penstock.engine.torch_engine.cache import LayerShape, SlotCache

KV, G, D = 2, 4, 16
CPU = torch.device("cpu")


def filled(rows: int, length: int, *, turned: bool, dtype: torch.dtype = torch.float32) -> SlotCache:
    torch.manual_seed(length)
    cache = SlotCache([LayerShape(KV, D, D, turned=turned)], dtype, CPU)
    cache.reserve(rows, length + 32, max_slots=rows, max_length=length + 32)
    for tensors in (cache.keys, cache.values):
        tensors[0].copy_(torch.randn(tensors[0].shape))
    return cache


def exact(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("nkgd,nkld->nkgl", query.double(), keys.double()) * D**-0.5 + mask
    return torch.einsum("nkgl,nkld->nkgd", scores.softmax(-1), values.double()).float()


@pytest.mark.parametrize("length", [32, 288])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("way", [attend, attend_by_products])
def test_a_query_gets_the_mean_of_the_values_that_it_may_see(
    way: attention.DecodeAttention, turned: bool, length: int
) -> None:
    cache = filled(3, length, turned=turned)
    query = torch.randn(3, KV, G, D)
    keys, values = cache.keys[0][:, :, :length], cache.values[0][:, :, :length]
    mask = decode_mask(torch.tensor([0, 7, length - 1]), length, torch.float32)
    torch.testing.assert_close(way(query, keys, values, mask), exact(query, keys, values, mask), atol=1e-5, rtol=1e-5)


def test_in_bfloat16_both_ways_are_as_close() -> None:
    cache = filled(8, 96, turned=True, dtype=torch.bfloat16)
    query = torch.randn(8, KV, G, D).bfloat16()
    keys, values = cache.keys[0][:, :, :96], cache.values[0][:, :, :96]
    mask = decode_mask(torch.arange(8) * 10 + 20, 96, torch.bfloat16)
    expected = exact(query, keys, values, mask)
    errors = [
        (way(query, keys.contiguous(), values, mask).float() - expected).abs().mean()
        for way in (attend, attend_by_products)
    ]
    assert errors[1] < 2 * errors[0]


def test_a_large_cache_is_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(7, 64, turned=True)
    query, (keys,), (values,) = torch.randn(7, KV, G, D), cache.keys, cache.values
    mask = decode_mask(torch.arange(7) * 9, cache.length, torch.float32)
    whole = attend_by_products(query, keys, values, mask)
    for rows in (1, 3):
        monkeypatch.setattr(attention, "_ONE_PRODUCT", rows * keys[0].numel())
        torch.testing.assert_close(attend_by_products(query, keys, values, mask), whole)
    monkeypatch.setattr(attention, "_ONE_PRODUCT", 1)
    torch.testing.assert_close(attend_by_products(query, keys, values, mask), whole)


@pytest.mark.parametrize("faster", ["kernel", "products"])
def test_keys_lie_as_the_faster_way_reads_them(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "shortest", lambda ways: {way: 1.0 + (way != faster) for way in ways})
    layer = LayerShape(KV, D, D)
    way, found = faster_attention(layer, G, torch.float32, CPU)
    assert (way, found.turned) == ((attend_by_products, True) if faster == "products" else (attend, False))
    cache = SlotCache([found], torch.float32, CPU)
    cache.reserve(2, 64, max_slots=2, max_length=64)
    assert cache.keys[0].shape == cache.values[0].shape == (2, KV, 64, D)
    assert cache.keys[0].stride()[-2:] == ((1, 64) if found.turned else (D, 1))
    assert cache.values[0].stride()[-2:] == (D, 1)


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_cached_survives_growth_moves_and_a_pause_however_keys_lie(turned: bool) -> None:
    cache = filled(2, 32, turned=turned)
    before = [tensor.clone() for tensor in cache.keys + cache.values]
    cache.reserve(5, 100, max_slots=8, max_length=200)
    assert cache.slots >= 5
    assert cache.length >= 100
    for tensor, old in zip(cache.keys + cache.values, before, strict=True):
        assert torch.equal(tensor[:2, :, :64], old)
        assert not tensor[2:].any()
        assert not tensor[:, :, 64:].any()
    cache.copy(1, 4, 20)
    cache.put_back(3, cache.copy_out(0, 30))
    cache.wipe(0, 0)
    for tensor, old in zip(cache.keys + cache.values, before, strict=True):
        assert torch.equal(tensor[4, :, :20], old[1, :, :20])
        assert torch.equal(tensor[3, :, :30], old[0, :, :30])
        assert not tensor[0].any()
