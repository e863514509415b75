"""What was compiled does what torch's operations do, between the products of a step and in sampling."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.engine.torch_engine import between
from penstock.engine.torch_engine.between import Between, CompiledBetween, Rope, Shape, choose_between
from penstock.engine.torch_engine.cache import LayerShape, SlotCache
from penstock.models.kernels import Kernels, kernels, kinds, load

CPU = torch.device("cpu")
SMALL = Shape(heads=6, kv_heads=2, head_dim=32, eps=1e-5)
SHAPES = [SMALL, Shape(5, 5, 32, 1e-6), Shape(7, 1, 64, 1e-5), Shape(8, 2, 96, 1e-5)]
"""Queries of a key: 3, 1, 7 and 4."""
Make = Callable[..., CompiledBetween]
ComputingWith = Callable[[int], None]
DTYPES = [torch.float32, torch.bfloat16]

needs_compiled = pytest.mark.skipif(kernels() is None, reason="kernels.c was not compiled: there was no C compiler")


def torchs(shape: Shape = SMALL, dtype: torch.dtype = torch.float32) -> Between:
    return Between(shape, dtype, CPU, deterministic=False)


@pytest.fixture(scope="module", params=kinds())
def compiled(request: pytest.FixtureRequest) -> Make:
    """For every kind of processor that this one is."""
    found = load(request.param)
    assert isinstance(found, Kernels)
    return lambda shape=SMALL, dtype=torch.float32: CompiledBetween(shape, dtype, CPU, found)


def rope(shape: Shape, length: int) -> Rope:
    frequencies = 1e4 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.arange(length)[:, None, None] * frequencies
    return Rope(torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1))


def filled(shape: Shape, dtype: torch.dtype, slots: int, length: int, *, turned: bool) -> SlotCache:
    cache = SlotCache([LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim, turned=turned)], dtype, CPU)
    cache.reserve(slots, length, max_slots=slots, max_length=length)
    generator = torch.Generator().manual_seed(0)
    for tensors in (cache.keys, cache.values):
        tensors[0].copy_(torch.randn(tensors[0].shape, generator=generator))
    return cache


def attended(
    way: Between, shape: Shape, dtype: torch.dtype, qkv: Tensor, positions: list[int], length: int, *, normed: bool
) -> tuple[Tensor, SlotCache]:
    slots = len(positions)
    cache = filled(shape, dtype, slots + 1, length, turned=way.turned_keys)
    attend = way.attention(cache, slice(0, slots), torch.tensor(positions), rope(shape, length), length)
    norm = torch.linspace(0.5, 2, 2 * shape.head_dim).view(2, -1) if normed else None
    return attend(0, qkv, norm).float(), cache


@needs_compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("normed", "threads"), [(False, 1), (True, 1), (True, 2), (False, 5)])
def test_compiled_attention_is_torchs_and_caches_the_same(
    shape: Shape, dtype: torch.dtype, normed: bool, threads: int, compiled: Make, computing_with: ComputingWith
) -> None:
    torch.manual_seed(1)
    computing_with(threads)
    positions = [0, 30, 31, 32, 63, 64, 95, 7, 1]
    qkv = torch.randn(len(positions), shape.heads + 2 * shape.kv_heads, shape.head_dim)
    ours, our_cache = attended(compiled(shape, dtype), shape, dtype, qkv, positions, 96, normed=normed)
    theirs, their_cache = attended(torchs(shape, dtype), shape, dtype, qkv, positions, 96, normed=normed)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.02}
    torch.testing.assert_close(ours, theirs, **close)
    for mine, other in zip(our_cache.keys + our_cache.values, their_cache.keys + their_cache.values, strict=True):
        torch.testing.assert_close(mine, other, **(close if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.01}))


@needs_compiled
def test_compiled_attention_in_bfloat16_is_the_closer_one(compiled: Make) -> None:
    torch.manual_seed(2)
    positions = list(range(5, 90, 5))
    qkv = torch.randn(len(positions), SMALL.heads + 2 * SMALL.kv_heads, SMALL.head_dim).bfloat16()
    exact, _ = attended(torchs(), SMALL, torch.float32, qkv.float(), positions, 96, normed=False)
    errors = [
        (attended(way, SMALL, torch.bfloat16, qkv, positions, 96, normed=False)[0] - exact).abs().mean()
        for way in (compiled(dtype=torch.bfloat16), torchs(dtype=torch.bfloat16))
    ]
    assert errors[0] <= errors[1]


@needs_compiled
def test_what_lies_behind_a_rows_position_and_in_other_slots_is_not_read(compiled: Make) -> None:
    positions = [3, 40]
    qkv = torch.randn(2, SMALL.heads + 2 * SMALL.kv_heads, SMALL.head_dim)
    way = compiled()
    found = []
    for broken in (False, True):
        cache = filled(SMALL, torch.float32, 3, 64, turned=True)
        if broken:
            for tensor in cache.keys + cache.values:
                tensor[0, :, 4:] = torch.nan
                tensor[1, :, 41:] = torch.inf
                tensor[2] = torch.nan
        attend = way.attention(cache, slice(0, 2), torch.tensor(positions), rope(SMALL, 64), 64)
        found.append(attend(0, qkv, None))
    assert torch.equal(found[0], found[1])
    assert found[0].isfinite().all()


@needs_compiled
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_a_number_that_is_none_reaches_its_own_row_and_no_other(bad: float, where: str, compiled: Make) -> None:
    cache = filled(SMALL, torch.float32, 3, 64, turned=True)
    getattr(cache, where)[0][1, :, 10, :] = bad
    attend = compiled().attention(cache, slice(0, 3), torch.tensor([20, 20, 20]), rope(SMALL, 64), 64)
    rows = attend(0, torch.randn(3, SMALL.heads + 2 * SMALL.kv_heads, SMALL.head_dim), None).isfinite()
    assert rows[[0, 2]].all()
    assert not rows[1].all()


@needs_compiled
def test_parts_of_the_slots_are_attended_as_all_of_them(compiled: Make) -> None:
    torch.manual_seed(3)
    positions = torch.randint(0, 64, (7,))
    qkv = torch.randn(7, SMALL.heads + 2 * SMALL.kv_heads, SMALL.head_dim)
    whole = filled(SMALL, torch.float32, 7, 64, turned=True)
    expected = compiled().attention(whole, slice(0, 7), positions, rope(SMALL, 64), 64)(0, qkv, None)
    cache, found = filled(SMALL, torch.float32, 7, 64, turned=True), []
    for begin, end in itertools.pairwise((0, 2, 3, 7)):
        part = slice(begin, end)
        found.append(compiled().attention(cache, part, positions[part], rope(SMALL, 64), 64)(0, qkv[part], None))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(cache.keys[0], whole.keys[0])


@needs_compiled
@pytest.mark.parametrize("positions", [[3, 64], [-1, 3]])
def test_a_position_outside_the_cache_is_refused(positions: list[int], compiled: Make) -> None:
    cache = filled(SMALL, torch.float32, 2, 64, turned=True)
    with pytest.raises(IndexError, match="in a cache of 64 tokens"):
        compiled().attention(cache, slice(0, 2), torch.tensor(positions), rope(SMALL, 64), 64)


@needs_compiled
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_norms_and_gates_are_torchs_with_any_number_of_threads(
    threads: int, compiled: Make, computing_with: ComputingWith
) -> None:
    torch.manual_seed(4)
    computing_with(threads)
    for rows in (1, 3, 64):
        hidden, weight = torch.randn(rows, 48) * 30, torch.rand(48) + 0.5
        for more in (None, torch.randn(rows, 48), torch.randn(rows, 48).bfloat16()):
            ours, theirs = hidden.clone(), hidden.clone()
            normed = compiled().norm(ours, more, weight)
            torch.testing.assert_close(normed, torchs().norm(theirs, more, weight))
            assert torch.equal(ours, theirs), "what is added stays"
        gate_up = torch.randn(rows, 2 * 80) * 20
        torch.testing.assert_close(compiled().gated(gate_up), torchs().gated(gate_up.clone()), atol=1e-6, rtol=2e-6)


@needs_compiled
def test_gates_of_every_size_and_of_what_is_no_number(compiled: Make) -> None:
    gates = torch.tensor(
        [0.0, -0.0, 1e-30, 1e4, -1e4, 80, -80, -88, -100, torch.inf, -torch.inf, torch.nan, 1, -1, 5, -5]
    )
    found, expected = (way.gated(torch.cat([gates, torch.ones(16)])[None].clone())[0] for way in (compiled(), torchs()))
    finite = expected.isfinite()
    torch.testing.assert_close(found[finite], expected[finite], atol=1e-30, rtol=1e-5)
    assert found[11].isnan(), "NaN stays"
    assert found[9] == torch.inf


@needs_compiled
def test_what_is_stored_in_bfloat16_is_rounded_as_torch_rounds(compiled: Make) -> None:
    torch.manual_seed(5)
    hidden = torch.randn(64, 48) * torch.logspace(-20, 20, 64)[:, None]
    weight = torch.ones(48)
    ours, theirs = compiled(dtype=torch.bfloat16).norm(hidden, None, weight), torchs().norm(hidden, None, weight)
    assert ours.dtype == torch.bfloat16
    # The sums before may differ in their last bit, and so may what is rounded, now and then.
    assert (ours != theirs.bfloat16()).float().mean() < 0.01
    torch.testing.assert_close(ours.float(), theirs, atol=0, rtol=2**-8)
    assert compiled(dtype=torch.bfloat16).norm(torch.full((1, 48), torch.nan), None, weight).isnan().all()


@needs_compiled
def test_keys_that_do_not_lie_as_the_values_ask_are_refused(compiled: Make) -> None:
    qkv, positions = torch.randn(2, SMALL.heads + 2 * SMALL.kv_heads, SMALL.head_dim), torch.tensor([1, 2])
    here = rope(SMALL, 64)
    cache = filled(SMALL, torch.float32, 2, 64, turned=False)
    with pytest.raises(ValueError, match="in steps of"):
        compiled().kernels.attend(qkv, cache.keys[0], cache.values[0], positions, here.cos, here.sin, None, 1e-5)
    keys, values = torch.zeros(2, 2, 32, 40).transpose(2, 3), torch.zeros(2, 2, 40, 32)
    with pytest.raises(ValueError, match="40 tokens of 32 numbers; both must be divisible by 32"):
        compiled().kernels.attend(qkv, keys, values, positions, here.cos, here.sin, None, 1e-5)


def chosen(
    shape: Shape = SMALL,
    widths: tuple[int, ...] = (48, 80),
    dtype: torch.dtype = torch.bfloat16,
    hidden: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    deterministic: bool = False,
) -> type:
    return type(choose_between(shape, widths, dtype, hidden, torch.device(device), deterministic=deterministic))


@needs_compiled
def test_what_was_compiled_is_used_where_it_fits_and_never_in_a_deterministic_run() -> None:
    assert chosen() is chosen(dtype=torch.float32) is CompiledBetween
    assert chosen(deterministic=True) is Between
    assert chosen(widths=(48, 72)) is Between, "not a whole number of vectors"
    assert chosen(SMALL._replace(head_dim=16)) is Between, "not two whole vectors"
    assert chosen(hidden=torch.bfloat16) is Between
    assert chosen(dtype=torch.float16) is Between
    assert chosen(device="meta") is Between


def test_without_a_compiler_torchs_operations_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "kernels", lambda: None)
    assert chosen() is Between


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_cached_survives_growth_moves_and_a_pause_however_keys_lie(turned: bool) -> None:
    cache = filled(SMALL, torch.float32, 2, 64, turned=turned)
    before = [tensor.clone() for tensor in cache.keys + cache.values]
    assert cache.keys[0].stride()[-2:] == ((1, 64) if turned else (32, 1))
    cache.reserve(5, 100, max_slots=8, max_length=200)
    for tensor, old in zip(cache.keys + cache.values, before, strict=True):
        assert tensor.shape[0] >= 5
        assert tensor.shape[2] >= 100
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
