"""Products of bfloat16 matrices against float64, whatever their layout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.models.bfloat16 import amx_is_hidden, has_fast_products, keep_onednn_alive, product

SIZE = st.integers(min_value=0, max_value=40)


@pytest.fixture(autouse=True)
def _onednn() -> None:
    keep_onednn_alive()


def matrix(rows: int, columns: int, *, transposed: bool, padding: int, seed: int) -> torch.Tensor:
    """A view into a wider matrix, in rows or in columns."""
    generator = torch.Generator().manual_seed(seed)
    shape = (columns, rows + padding) if transposed else (rows, columns + padding)
    whole = torch.randn(shape, generator=generator).bfloat16()
    return whole[:, :rows].t() if transposed else whole[:, :columns]


@given(SIZE, SIZE, SIZE, st.booleans(), st.booleans(), st.integers(0, 3), st.booleans(), st.booleans())
def test_a_product_is_the_float32_sum_of_the_bfloat16_products(
    m: int, n: int, k: int, a_turned: bool, b_turned: bool, padding: int, add: bool, given_out: bool
) -> None:
    a = matrix(m, k, transposed=a_turned, padding=padding, seed=m + 1)
    b = matrix(k, n, transposed=b_turned, padding=padding, seed=n + 50)
    start = torch.full((m, n), 3.0)
    expected = a.double() @ b.double() + (3.0 if add and given_out else 0.0)
    result = product(a, b, start if given_out else None, add=add)
    assert result.dtype == torch.float32
    assert given_out == (result is start)
    # A route by way of torch rounds the result itself to bfloat16.
    torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=0.05)


def test_what_lies_beside_the_result_is_not_touched() -> None:
    wide = torch.zeros(4, 10)
    product(torch.ones(4, 8).bfloat16(), torch.ones(8, 5).bfloat16(), wide[:, :5])
    assert wide[:, :5].eq(8).all() and wide[:, 5:].eq(0).all()


@pytest.mark.skipif(not has_fast_products(), reason="torch checks by itself")
def test_a_result_of_another_shape_or_dtype_is_refused() -> None:
    a, b = torch.ones(4, 8).bfloat16(), torch.ones(8, 5).bfloat16()
    with pytest.raises(ValueError, match="into"):
        product(a, b, torch.zeros(4, 4))
    with pytest.raises(ValueError, match="a product of"):
        product(a, a)
    with pytest.raises(TypeError, match="float32"):
        product(a, b.float())
    with pytest.raises(ValueError, match="rows"):
        product(a, b, torch.zeros(5, 4).t())
    with pytest.raises(ValueError, match="together"):
        product(torch.ones(8, 16).bfloat16()[::2, ::2], b)


@pytest.mark.parametrize(
    ("flags", "level", "hidden"), [("avx amx_tile", 28, True), ("avx amx_tile", 32, False), ("avx", 28, False)]
)
def test_amx_is_hidden_where_the_processor_has_it_and_does_not_describe_it(
    flags: str, level: int, hidden: bool, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\ncpuid level\t: {level}\nflags\t\t: {flags}\n")
    assert amx_is_hidden(cpuinfo) == hidden
    assert not amx_is_hidden(tmp_path / "missing")


def test_what_the_user_said_of_onednn_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    keep_onednn_alive()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
