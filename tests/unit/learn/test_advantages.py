import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.learn.advantages import ESTIMATORS, get_estimator

groups_of_scores = st.lists(st.lists(st.floats(-100, 100), min_size=2, max_size=9), min_size=1, max_size=5)


def test_grpo_is_the_z_score_with_the_sample_deviation() -> None:
    # mean 0.25, squared deviations 0.5625 + 3 * 0.0625 = 0.75, sample variance 0.75 / 3 = 0.25, deviation 0.5
    [advantages] = get_estimator("grpo")([[1.0, 0.0, 0.0, 0.0]])
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    assert get_estimator("dr_grpo")([[1.0, 0.0, 0.0, 0.0]]) == [[0.75, -0.25, -0.25, -0.25]]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # 4 - (1 + 1) / 2 = 3, and 1 - (4 + 1) / 2 = -1.5
    [advantages] = get_estimator("rloo")([[4.0, 1.0, 1.0]])
    assert advantages == pytest.approx([3.0, -1.5, -1.5])


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_equal_scores_give_exactly_zero(name: str) -> None:
    assert get_estimator(name)([[0.1] * 3, [1e9] * 7]) == [[0.0] * 3, [0.0] * 7]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_group_of_one_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="prompt_repeat_k must be at least 2"):
        get_estimator(name)([[1.0, 2.0], [1.0]])


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(scores=groups_of_scores)
def test_advantages_are_finite_sum_to_zero_and_keep_the_order(name: str, scores: list[list[float]]) -> None:
    for group, advantages in zip(scores, get_estimator(name)(scores), strict=True):
        assert all(math.isfinite(a) for a in advantages)
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-6 * max(1, *map(abs, advantages)))
        ranked = [a for _, a in sorted(zip(group, advantages, strict=True))]
        assert ranked == sorted(ranked)


def test_an_estimator_may_be_given_by_its_dotted_path() -> None:
    assert get_estimator("penstock.learn.advantages:rloo") is ESTIMATORS["rloo"]


def test_an_unknown_estimator_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'grpo'"):
        get_estimator("gpro")
