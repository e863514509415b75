"""Every estimator against numpy written from its paper's formula, on random batches and at the edges."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, RunError, UserFunctionError
from penstock.learn.advantages import (
    COMPARES_SIBLINGS,
    ESTIMATORS,
    AnswerTokens,
    Scored,
    estimate,
    get_estimator,
)

CONSTANT = ("grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "maxrl", "none")
"""Those that give every token of an answer the same."""


def tokens_of(score: float, mask: list[int], penalties: list[float] | None = None) -> AnswerTokens:
    written = np.asarray(mask, dtype=np.uint8)
    rewards = -np.asarray(penalties if penalties is not None else np.zeros(len(mask)), dtype=np.float64) * written
    rewards[np.flatnonzero(written)[-1]] += score
    ids = np.arange(len(mask), dtype=np.int32)
    logprobs = np.full(len(mask), -1.0, np.float32)
    return AnswerTokens(ids=ids, logprobs=logprobs, mask=written, model_steps=np.zeros_like(ids), rewards=rewards)


def random_scored(seed: int, *, lowest: float = -2.0) -> Scored:
    """Groups of several sizes, answers of several lengths with text of tools in them."""
    rng = np.random.default_rng(seed)
    scores, tokens = [], []
    for _ in range(4):
        k = int(rng.integers(2, 7))
        row = (lowest + rng.random(k) * 4).tolist()
        masks = [(rng.random(rng.integers(1, 12)) < 0.7).astype(int) for _ in range(k)]
        for mask in masks:
            mask[rng.integers(len(mask))] = 1
        scores.append(row)
        tokens.append([tokens_of(s, m.tolist(), rng.random(len(m)).tolist()) for s, m in zip(row, masks, strict=True)])
    return scored(scores, tokens)


def scored(scores: list[list[float]], tokens: list[list[AnswerTokens]] | None = None) -> Scored:
    tokens = tokens or [[tokens_of(s, [1] * (1 + i)) for i, s in enumerate(row)] for row in scores]
    return Scored(scores, [[int(t.mask.sum()) for t in row] for row in tokens], tokens)


def written(values: Any, given: Scored) -> np.ndarray[Any, Any]:
    """Of all tokens that the model wrote."""
    pairs = ((v, t) for row, group in zip(values, given.tokens, strict=True) for v, t in zip(row, group, strict=True))
    return np.concatenate([v[t.mask == 1] for v, t in pairs])


def constants(values: Any) -> list[list[float]]:
    """One number per rollout, which all its tokens have."""
    assert all((v == v[0]).all() for row in values for v in row)
    return [[float(v[0]) for v in row] for row in values]


# Written from the papers, one group at a time.


def by_hand_grpo(r: np.ndarray[Any, Any], _: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (r - r.mean()) / (np.sqrt(((r - r.mean()) ** 2).sum() / (len(r) - 1)) + 1e-6)  # type: ignore[no-any-return]


def by_hand_dr_grpo(r: np.ndarray[Any, Any], _: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return r - r.mean()


def by_hand_rloo(r: np.ndarray[Any, Any], _: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray([r[i] - np.delete(r, i).mean() for i in range(len(r))])


def by_hand_opo(r: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return r - (lengths * r).sum() / lengths.sum()


def by_hand_pass_at_k(r: np.ndarray[Any, Any], _: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    best, second = np.sort(r)[::-1][:2]
    return np.where(np.arange(len(r)) == r.argmax(), best - second, 0.0)


def by_hand_maxrl(r: np.ndarray[Any, Any], _: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (r - r.mean()) / r.mean()


BY_HAND: dict[str, Callable[..., np.ndarray[Any, Any]]] = {
    "grpo": by_hand_grpo,
    "dr_grpo": by_hand_dr_grpo,
    "rloo": by_hand_rloo,
    "opo": by_hand_opo,
    "pass_at_k": by_hand_pass_at_k,
    "maxrl": by_hand_maxrl,
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_estimators_of_a_group_are_their_papers_formula(name: str, seed: int) -> None:
    given = random_scored(seed, lowest=0.0 if name == "maxrl" else -2.0)
    found = constants(estimate(name, given))
    for row, scores, lengths in zip(found, given.scores, given.lengths, strict=True):
        np.testing.assert_allclose(row, BY_HAND[name](np.asarray(scores), np.asarray(lengths)), rtol=1e-6, atol=1e-9)


def by_hand_returns(answer: AnswerTokens, gamma: float) -> list[float]:
    """Of the tokens that the model wrote, from the last one back."""
    own = answer.rewards[answer.mask == 1].tolist()
    return [sum(reward * gamma**distance for distance, reward in enumerate(own[t:])) for t in range(len(own))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_whitens_the_returns_of_all_tokens(seed: int, gamma: float) -> None:
    given = random_scored(seed)
    found = written(estimate("reinforce_plus_plus", given, gamma=gamma), given)
    returns = np.concatenate([by_hand_returns(answer, gamma) for row in given.tokens for answer in row])
    np.testing.assert_allclose(found, (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6), rtol=1e-6, atol=1e-9)


def test_a_return_reaches_the_tokens_before_the_text_of_a_tool() -> None:
    """verl's running return is reset where the mask is 0; a tool call would cut the credit of what led to it."""
    given = scored([[1.0, 0.0]], [[tokens_of(1.0, [1, 0, 0, 1]), tokens_of(0.0, [1, 1])]])
    [[first, second]] = estimate("reinforce_plus_plus", given)
    assert first[0] == first[3] > 0 > second[0] == second[1]


@pytest.mark.parametrize("seed", range(5))
def test_reinforce_plus_plus_baseline_whitens_what_is_left_of_the_group_mean(seed: int) -> None:
    given = random_scored(seed)
    found = written(estimate("reinforce_plus_plus_baseline", given), given)
    centred = np.concatenate(
        [
            np.full(length, score - np.mean(scores))
            for scores, lengths in zip(given.scores, given.lengths, strict=True)
            for score, length in zip(scores, lengths, strict=True)
        ]
    )
    np.testing.assert_allclose(found, (centred - centred.mean()) / (centred.std(ddof=1) + 1e-6), rtol=1e-6, atol=1e-9)


def test_none_has_nothing_to_say() -> None:
    assert constants(estimate("none", scored([[1.0, 0.0], [3.0]]))) == [[0.0, 0.0], [0.0]]


def test_grpo_is_the_z_score_with_the_sample_deviation() -> None:
    # mean 0.25, squared deviations 0.5625 + 3 * 0.0625 = 0.75, sample variance 0.75 / 3 = 0.25, deviation 0.5
    [advantages] = constants(estimate("grpo", scored([[1.0, 0.0, 0.0, 0.0]])))
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_opo_weighs_the_baseline_by_length() -> None:
    # Lengths 1 and 3: the baseline is (1 * 1 + 3 * 0) / 4.
    given = scored([[1.0, 0.0]], [[tokens_of(1.0, [1]), tokens_of(0.0, [1, 0, 1, 1])]])
    assert constants(estimate("opo", given)) == [[0.75, -0.25]]


def test_two_best_answers_have_no_lead() -> None:
    assert constants(estimate("pass_at_k", scored([[1.0, 1.0, 0.0]]))) == [[0.0] * 3]


def test_maxrl_needs_scores_that_are_no_penalties() -> None:
    with pytest.raises(RunError, match=r"a score is -1\.0; maxrl divides by the mean"):
        estimate("maxrl", scored([[-1.0, 1.0]]))


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"reinforce_plus_plus"}))
def test_equal_scores_give_exactly_zero(name: str) -> None:
    assert constants(estimate(name, scored([[0.1] * 3, [1e9] * 7]))) == [[0.0] * 3, [0.0] * 7]


def test_equal_returns_give_exactly_zero() -> None:
    assert constants(estimate("reinforce_plus_plus", scored([[0.1, 0.1], [0.1]]))) == [[0.0, 0.0], [0.0]]


@pytest.mark.parametrize("name", sorted(COMPARES_SIBLINGS))
def test_a_group_of_one_is_an_error(name: str) -> None:
    with pytest.raises(RunError, match="prompt_repeat_k must be at least 2"):
        estimate(name, scored([[1.0, 2.0], [1.0]]))


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - COMPARES_SIBLINGS))
def test_the_others_take_a_group_of_one(name: str) -> None:
    assert all(np.isfinite(v).all() for row in estimate(name, scored([[1.0, 2.0], [1.0]])) for v in row)


groups_of_scores = st.lists(st.lists(st.floats(-100, 100), min_size=2, max_size=9), min_size=1, max_size=5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(scores=groups_of_scores)
def test_centred_advantages_sum_to_zero_and_keep_the_order(name: str, scores: list[list[float]]) -> None:
    for group, advantages in zip(scores, constants(estimate(name, scored(scores))), strict=True):
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-6 * max(1, *map(abs, advantages)))
        ranked = [a for _, a in sorted(zip(group, advantages, strict=True))]
        assert ranked == sorted(ranked)


finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(scores=st.lists(st.lists(finite, min_size=2, max_size=5), min_size=1, max_size=3))
def test_no_finite_score_makes_an_advantage_that_is_not(name: str, scores: list[list[float]]) -> None:
    """Numbers near the largest double are refused by name where their difference is none any more."""
    try:
        advantages = estimate(name, scored(scores))
    except RunError as error:
        assert f"advantage {name}" in str(error)
        assert max(abs(s) for row in scores for s in row) > 1e150 or name == "maxrl"
    else:
        assert all(np.isfinite(v).all() for row in advantages for v in row)


def by_length(scores: list[list[float]], lengths: list[list[int]]) -> list[list[float]]:
    return [[s / n for s, n in zip(*pair, strict=True)] for pair in zip(scores, lengths, strict=True)]


def by_token(what_it_calls_them: list[list[float]], tokens: list[list[AnswerTokens]]) -> Any:
    return [[np.arange(len(t.mask)) for t in row] for row in tokens]


def too_few(scores: list[list[float]], tokens: list[list[AnswerTokens]]) -> Any:
    return [[np.zeros(1) for _ in row] for row in tokens]


def test_an_estimator_of_the_users_asks_by_the_names_of_its_parameters() -> None:
    given = scored([[1.0, 1.0]])
    assert constants(estimate(f"{__name__}.by_length", given)) == [[1.0, 0.5]]
    assert [v.tolist() for v in estimate(f"{__name__}.by_token", given)[0]] == [[0.0], [0.0, 1.0]]
    with pytest.raises(UserFunctionError, match=r"\(1,\) advantages for an answer of 2 tokens"):
        estimate(f"{__name__}.too_few", given)


def test_an_estimator_may_be_given_by_its_dotted_path() -> None:
    assert get_estimator("penstock.learn.advantages:rloo") is ESTIMATORS["rloo"]


def test_an_unknown_estimator_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'grpo'"):
        get_estimator("gpro")
