"""Uniforms by counter, the inverse CDF in two levels, and what is cut from a distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.engine.torch_engine.sampling import Sampling, fold_seed, invert_cdf, sample, uniforms
from penstock.models.kernels import BLOCK, Kernels, kernels

SEEDS = st.integers(-(2**70), 2**70)
UNIFORMS = st.floats(0, 1, exclude_max=True)


_compiled: list[Kernels | None] = [None]


@pytest.fixture(scope="module", autouse=True, params=["torch", "compiled"])
def sums_of_blocks(request: pytest.FixtureRequest) -> None:
    """Made by torch's operations, and by what was compiled."""
    _compiled[0] = kernels() if request.param == "compiled" else None
    if request.param == "compiled" and _compiled[0] is None:
        pytest.skip("nothing was compiled")


def draw(logits: Any, uniform: Any, *, temperature: float = 1.0, **how: Any) -> tuple[list[int], np.ndarray]:
    table = torch.tensor(logits, dtype=torch.float32)
    rows = len(table)
    sampling = Sampling(
        temperature=np.full(rows, temperature, np.float32),
        uniform=np.broadcast_to(np.asarray(uniform, np.float64), rows).copy(),
        forbidden=how.get("forbidden", {}),
        truncated=how.get("truncated", {}),
    )
    ids, logprobs = sample(table.clone(), sampling, kernels=_compiled[0])
    return ids.tolist(), logprobs


@settings(max_examples=30)
@given(seed=SEEDS, first=st.integers(0, 10**9))
def test_the_ith_uniform_is_a_function_of_seed_and_i(seed: int, first: int) -> None:
    run = uniforms(np.full(4, fold_seed(seed)), np.arange(first, first + 4))
    single = uniforms(np.array([fold_seed(seed)]), np.array([first + 2]))
    assert run[2] == single[0]
    assert ((run >= 0) & (run < 1)).all()
    assert len(set(run)) == 4


def test_uniforms_of_neighbouring_seeds_look_independent() -> None:
    count = 200
    table = np.stack([uniforms(np.full(count, fold_seed(seed)), np.arange(count)) for seed in range(count)])
    assert abs(table.mean() - 0.5) < 0.01
    assert abs(table.var() - 1 / 12) < 0.005
    for axis in (0, 1):
        centred = table - 0.5
        neighbours = (np.take(centred, range(1, count), axis) * np.take(centred, range(count - 1), axis)).mean()
        assert abs(neighbours) < 0.005
    assert len(np.unique(table)) == count * count


@settings(max_examples=30)
@given(
    weights=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 3).map(lambda blocks: blocks * BLOCK)),
        elements=st.one_of(st.just(0.0), st.floats(0, 1, width=32), st.floats(0, 2**-100, width=32)),
        fill=st.just(0.0),
    ),
    uniform=UNIFORMS,
    place=st.integers(0, 10**6),
)
def test_the_inverse_cdf_finds_the_token_and_never_one_of_probability_0(
    weights: Any, uniform: float, place: int
) -> None:
    weights[:, place % weights.shape[1]] += 1e-3
    table = torch.from_numpy(weights)
    sums = table.view(len(table), -1, BLOCK).sum(-1)
    rows = torch.arange(len(table))
    drawn = torch.full((len(table),), uniform, dtype=torch.float64)
    found = invert_cdf(sums, drawn, lambda blocks: table.view(len(table), -1, BLOCK)[rows, blocks]).numpy()
    for row, index in zip(weights.astype(np.float64), found, strict=True):
        assert row[index] > 0
        total = row.sum()
        after = row[: index + 1].sum() / total
        assert after - row[index] / total - 1e-6 <= uniform <= after + 1e-6


@settings(max_examples=30)
@given(uniform=UNIFORMS)
def test_a_certain_token_is_always_drawn(uniform: float) -> None:
    logits = np.full((1, 300), -np.inf)
    logits[0, 299] = 3.0
    assert draw(logits, uniform)[0] == [299]
    assert draw(logits, np.nextafter(1.0, 0))[0] == [299]


def test_samples_follow_the_distribution() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=200) * 2
    count = 20_000
    uniform = uniforms(np.arange(count).astype(np.uint64), np.zeros(count, np.int64))
    for temperature in (1.0, 0.5):
        ids, _ = draw(np.tile(logits, (count, 1)), uniform, temperature=temperature)
        expected = np.exp(logits / temperature)
        expected /= expected.sum()
        seen = np.bincount(ids, minlength=200) / count
        assert np.abs(seen - expected).sum() / 2 < 0.03


@settings(max_examples=30)
@given(
    logits=arrays.arrays(np.float32, (3, 150), elements=st.floats(-30, 30, width=32)),
    uniform=UNIFORMS,
    temperature=st.floats(0.125, 4, width=32),
)
def test_logprobs_are_log_softmax_at_the_temperature(logits: Any, uniform: float, temperature: float) -> None:
    ids, logprobs = draw(logits, uniform, temperature=temperature)
    expected = torch.log_softmax(torch.from_numpy(logits).double() / temperature, -1).numpy()
    np.testing.assert_allclose(logprobs, expected[np.arange(3), ids], atol=1e-4)


@settings(max_examples=30)
@given(
    logits=arrays.arrays(np.float32, (2, 40), elements=st.floats(-8, 8, width=32)),
    uniform=UNIFORMS,
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 50),
    min_p=st.floats(0, 0.99),
)
def test_a_cut_keeps_the_likeliest_tokens_and_the_models_logprob(
    logits: Any, uniform: float, top_p: float, top_k: int, min_p: float
) -> None:
    ids, logprobs = draw(logits, uniform, truncated={0: (top_p, top_k, min_p)})
    plain, _ = draw(logits, uniform)
    assert ids[1] == plain[1]
    probabilities = np.exp(torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy())
    np.testing.assert_allclose(np.exp(logprobs), probabilities[np.arange(2), ids], rtol=1e-3)
    row, chosen = probabilities[0], probabilities[0][ids[0]]
    likelier = row[row > chosen * (1 + 1e-6)]
    if top_k:
        assert len(likelier) < top_k
    assert chosen >= min_p * row.max() * (1 - 1e-5)
    kept = np.sort(row)[::-1][: top_k or None].sum()
    assert likelier.sum() <= top_p * kept + 1e-5


def test_forbidden_tokens_are_not_drawn_even_when_they_hold_all_the_weight() -> None:
    logits = np.zeros((2, 130))
    logits[:, 7] = 500.0
    ids, logprobs = draw(logits, 0.3, forbidden={0: [7, 8, 4000]})
    assert ids[0] not in (7, 8)
    assert ids[1] == 7
    assert logprobs[0] == -500.0
    ids, _ = draw(logits, 0.3, temperature=0.0, forbidden={0: [7]})
    assert ids == [0, 7]


def test_logits_that_are_not_numbers_give_a_logprob_that_is_not_one() -> None:
    logits = np.zeros((2, 10))
    logits[0, 3] = np.nan
    _, logprobs = draw(logits, 0.5)
    assert np.isnan(logprobs[0])
    assert np.isfinite(logprobs[1])


def test_logits_in_bfloat16_are_sampled_as_the_same_numbers_in_float32() -> None:
    torch.manual_seed(0)
    table = (torch.randn(6, 300) * 4).bfloat16()
    how = Sampling(
        temperature=np.array([1, 0.5, 0, 1, 1, 1], np.float32),
        uniform=np.linspace(0, 0.99, 6),
        forbidden={3: [int(table[3].argmax())]},
        truncated={4: (0.5, 0, 0.0)},
    )
    found = [sample(logits, how, kernels=_compiled[0]) for logits in (table.clone(), table.float())]
    assert found[0][0].tolist() == found[1][0].tolist()
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-6)


def test_a_row_may_be_cut_forbidden_and_greedy_at_once() -> None:
    logits = np.zeros((1, 140))
    logits[0, [5, 130]] = 9.0, 8.0
    ids, logprobs = draw(logits, 0.99, temperature=0.0, forbidden={0: [5]}, truncated={0: (1.0, 1, 0.0)})
    assert ids == [130]
    np.testing.assert_allclose(logprobs[0], 8 - np.log(np.exp(logits).sum()), atol=1e-5)
