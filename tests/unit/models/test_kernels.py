"""What was compiled, beside what torch computes; attention, norms and gates are in `engine/test_between.py`."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.models.kernels import BLOCK, Kernels, kernels, kinds, load

DTYPES = [torch.float32, torch.bfloat16]

needs_compiled = pytest.mark.skipif(kernels() is None, reason="kernels.c was not compiled: there was no C compiler")


@pytest.fixture(scope="module", params=kinds())
def compiled(request: pytest.FixtureRequest) -> Kernels:
    """For every kind of processor that this one is."""
    found = load(request.param)
    assert isinstance(found, Kernels)
    return found


@needs_compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "threads"), [(7, 1), (16, 1), (128, 2), (131, 1), (500, 1), (4096 + 3, 1), (4096 + 3, 2), (4096 + 3, 7)]
)
def test_compiled_sums_of_blocks_are_torchs(
    width: int, threads: int, dtype: torch.dtype, compiled: Kernels, computing_with: Callable[[int], None]
) -> None:
    torch.manual_seed(width)
    computing_with(threads)
    logits = torch.randn(5, width) * torch.tensor([1, 5, 30, 200, 0])[:, None]
    logits[1, width // 2] = -torch.inf
    logits[2, -1] = 500
    logits[3, : min(width // 2, 256)] = -torch.inf  # whole blocks of what cannot be drawn
    logits = logits.to(dtype)
    sums, top = compiled.sum_blocks(logits)
    exact = torch.nn.functional.pad(logits.double(), (0, -width % BLOCK), value=-torch.inf)
    expected = (exact - exact.amax(-1, keepdim=True)).exp().view(5, -1, BLOCK).sum(-1)
    assert top.dtype == sums.dtype == torch.float32
    assert torch.equal(top, logits.float().amax(-1))
    torch.testing.assert_close(sums.double(), expected, atol=1e-37, rtol=2e-6)


@needs_compiled
def test_a_row_that_is_no_number_is_none_in_its_sums_and_no_other_is(compiled: Kernels) -> None:
    logits = torch.zeros(5, 300)
    logits[1, 17], logits[2, 299], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    logits[4, :128], logits[4, 5] = -torch.inf, torch.nan
    sums, _ = compiled.sum_blocks(logits)
    assert sums.sum(-1).isfinite().tolist() == [True, False, False, True, False]


@needs_compiled
def test_what_is_compiled_computes_in_float32_whatever_new_tensors_are_made_of(compiled: Kernels) -> None:
    """A model that is loaded in another thread changes that for all of them."""
    logits = torch.randn(3, 200)
    expected, _ = compiled.sum_blocks(logits)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        sums, top = compiled.sum_blocks(logits)
    finally:
        torch.set_default_dtype(before)
    assert sums.dtype == top.dtype == torch.float32
    assert torch.equal(sums, expected)


def multiplying() -> Kernels:
    found = kernels()
    if found is None or not found.multiplies:
        pytest.skip("this processor has no bfloat16 instructions, or nothing was compiled for them")
    return found


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 29, 64, 1030])
@pytest.mark.parametrize("width", [1, 15, 16, 48, 50, 97, 240])
@pytest.mark.parametrize("depth", [2, 48, 130])
def test_compiled_products_are_exact_but_for_sums_in_float32(rows: int, width: int, depth: int) -> None:
    found = multiplying()
    torch.manual_seed(rows * width + depth)
    x, matrix = torch.randn(rows, depth).bfloat16(), torch.randn(width, depth).bfloat16()
    out = torch.full((rows, width), torch.nan)
    assert found.product(x, found.panels(matrix), out) is out
    torch.testing.assert_close(out.double(), x.double() @ matrix.double().t(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_of_a_compiled_product_is_the_same_whatever_is_beside_it(threads: int) -> None:
    found, before = multiplying(), torch.get_num_threads()
    x, matrix = torch.randn(21, 64).bfloat16(), torch.randn(100, 64).bfloat16()
    panels = found.panels(matrix)
    torch.set_num_threads(threads)
    try:
        together = found.product(x, panels, torch.empty(21, 100))
        for begin, end in ((0, 1), (5, 12), (20, 21)):
            alone = found.product(x[begin:end], panels, torch.empty(end - begin, 100))
            assert torch.equal(alone, together[begin:end])
    finally:
        torch.set_num_threads(before)


def test_a_matrix_that_begins_between_two_pairs_is_multiplied_as_any_other() -> None:
    found = multiplying()
    lent = torch.randn(1 + 96 * 64).bfloat16()[1:].view(96, 64)
    x = torch.randn(3, 64).bfloat16()
    products = [found.product(x, found.panels(matrix), torch.empty(3, 96)) for matrix in (lent, lent.clone())]
    assert torch.equal(*products)


def test_a_product_that_does_not_fit_is_refused() -> None:
    found = multiplying()
    panels = found.panels(torch.randn(100, 64).bfloat16())
    x, out = torch.randn(4, 64).bfloat16(), torch.empty(4, 100)
    for bad_x, bad_out in ((x[:, :62], out), (x, out[:3]), (x, torch.empty(4, 200)), (x, torch.empty(4, 90))):
        with pytest.raises(ValueError, match="times panels"):
            found.product(bad_x, panels, bad_out)
    for bad_x, bad_out in ((x.float(), out), (x, out.double()), (x, torch.empty(100, 4).t())):
        with pytest.raises(TypeError, match="a product of"):
            found.product(bad_x, panels, bad_out)


@pytest.mark.skipif(
    not kinds() or shutil.which("gcc") is None or not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
    reason="there is no C compiler here, or no Python.h, or it is not compiled for this processor",
)
def test_it_is_compiled_where_there_is_a_compiler() -> None:
    assert kernels() is not None
    assert all(load(kind) is not None for kind in kinds())
