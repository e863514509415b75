"""Importance weights and rejection against numpy, and what the ratio of a step is taken against."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_tokens import Array, make_tokens, random_tokens

from penstock.learn.correction import PRESETS, REJECTIONS, CorrectionConfig, correct, old_policy
from penstock.learn.losses import DPPOLossConfig, LossConfig, LossTokens, PGLossConfig, PPOLossConfig


def over_answers(values: Array, answers: Array, what: str) -> Array:
    """For each token the sum, mean or maximum over its answer."""
    found = np.zeros_like(values)
    for answer in set(answers):
        of_answer = answers == answer
        found[of_answer] = getattr(np, what)(values[of_answer])
    return found


def weights_by_hand(columns: dict[str, Array], level: str, low: float | None, high: float) -> Array:
    log_ratio = columns["logprobs"] - columns["engine"]
    ratio = np.exp(log_ratio if level == "token" else over_answers(log_ratio, columns["answers"], "sum"))
    if low is None:
        return np.minimum(ratio, high)
    return np.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("threshold", "band"), [(2.0, (None, 2.0)), (1.3, (None, 1.3)), ("0.5_5.0", (0.5, 5.0))])
def test_weights_are_truncated_by_one_number_and_banded_by_two(
    level: Any, threshold: Any, band: tuple[float | None, float], seed: int
) -> None:
    columns = random_tokens(seed, spread=0.3)
    config = CorrectionConfig(bypass_mode=False, rollout_is=level, rollout_is_threshold=threshold)
    found = correct(make_tokens(**columns), config, weighs=True)
    expected = weights_by_hand(columns, level, *band)
    np.testing.assert_allclose(found.weights, expected, rtol=1e-6)
    name, dropped = ("truncated", expected == band[1]) if band[0] is None else ("outside_band", expected == 0)
    np.testing.assert_array_equal(found.shares[f"correction/{name}"], dropped)


def rejected_by_hand(columns: dict[str, Array], reason: str, low: float, high: float) -> Array:
    """Ratios r = trainer / engine: k1 is log r and bounded as r; k2 is (log r)^2 / 2; k3 is r - 1 - log r."""
    level, kind = reason.rsplit("_", 1)
    log_r = columns["logprobs"] - columns["engine"]
    values = {"k1": log_r, "k2": log_r**2 / 2, "k3": np.exp(log_r) - 1 - log_r}[kind]
    bounds = (math.log(low), math.log(high)) if kind == "k1" else (-math.inf, high)
    if level == "seq_max":
        outside = ((values < bounds[0]) | (values > bounds[1])).astype(float)
        return over_answers(outside, columns["answers"], "max") == 1
    if level != "token":
        values = over_answers(values, columns["answers"], level.removeprefix("seq_"))
    return (values < bounds[0]) | (values > bounds[1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reason", REJECTIONS)
def test_each_reason_rejects_what_its_formula_says(reason: str, seed: int) -> None:
    columns = random_tokens(seed, spread=0.3)
    low, high = (0.8, 1.25) if reason.endswith("k1") else (0.0, 0.02)
    threshold = "0.8_1.25" if reason.endswith("k1") else high
    config = CorrectionConfig(bypass_mode=False, rollout_rs=reason, rollout_rs_threshold=threshold)
    found = correct(make_tokens(**columns), config, weighs=True)
    expected = rejected_by_hand(columns, reason, low, high)
    assert 0 < expected.sum() < len(expected)
    np.testing.assert_array_equal(found.shares[f"rejected/{reason}"], expected)
    np.testing.assert_array_equal(found.weights, ~expected)


def test_one_number_bounds_a_ratio_from_both_sides() -> None:
    assert CorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=4.0).rejections() == {"token_k1": (0.25, 4.0)}


def test_several_reasons_reject_together_and_are_told_apart() -> None:
    columns = random_tokens(1, spread=0.3)
    config = CorrectionConfig(rollout_rs="token_k1, seq_max_k2", rollout_rs_threshold="0.5_2.0, 1.0")
    found = correct(make_tokens(**columns), config, weighs=True)
    first, second = rejected_by_hand(columns, "token_k1", 0.5, 2.0), rejected_by_hand(columns, "seq_max_k2", 0, 1.0)
    np.testing.assert_array_equal(found.shares["rejected/token_k1"], first)
    np.testing.assert_array_equal(found.shares["rejected/seq_max_k2"], second)
    np.testing.assert_array_equal(found.shares["rejected/any"], first | second)
    np.testing.assert_array_equal(found.weights, ~(first | second))


@pytest.mark.parametrize("seed", range(3))
def test_a_bad_answer_that_the_policy_has_left_is_dropped_whole(seed: int) -> None:
    """DeepSeek-V3.2: drop where A < 0 and the mean of log(engine / current) is above delta."""
    columns = random_tokens(seed, num_answers=20)
    config = CorrectionConfig(off_policy_mask_threshold=0.1)
    found = correct(make_tokens(**columns), config, weighs=True)
    drift = over_answers(columns["engine"] - columns["logprobs"], columns["answers"], "mean")
    expected = (drift > 0.1) & (columns["advantages"] < 0)
    assert expected.any()
    np.testing.assert_array_equal(found.shares["rejected/off_policy"], expected)
    np.testing.assert_array_equal(found.weights, ~expected)


def test_weights_compare_the_engine_with_the_trainer_before_the_step() -> None:
    columns = random_tokens(2, spread=0.2)
    proximal = columns["engine"] + 0.5
    tokens = make_tokens(**columns, proximal=proximal)
    found = correct(tokens, CorrectionConfig(rollout_is="token", rollout_is_threshold=10.0), weighs=True)
    np.testing.assert_allclose(found.weights, math.exp(0.5))


def test_where_the_ratio_is_the_weight_nothing_is_weighed_and_still_rejected() -> None:
    columns = random_tokens(1, spread=0.3)
    config = CorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    found = correct(make_tokens(**columns), config, weighs=False)
    expected = rejected_by_hand(columns, "token_k1", 0.5, 2.0)
    np.testing.assert_array_equal(found.weights, ~expected)


@pytest.mark.parametrize(
    ("bypass", "on_policy", "updates", "expected"),
    [
        (None, True, 1, "current"),
        (None, True, 2, "engine"),
        (None, False, 1, "engine"),
        (False, True, 1, "current"),
        (False, False, 1, "current"),
        (False, False, 4, "proximal"),
        (True, True, 1, "engine"),
        (True, False, 4, "engine"),
    ],
)
def test_old_logprobs_are_computed_again_only_where_they_are_needed(
    bypass: bool | None, on_policy: bool, updates: int, expected: str
) -> None:
    config = CorrectionConfig(bypass_mode=bypass)
    for loss in (PPOLossConfig(), PGLossConfig()):
        assert old_policy(config, loss, on_policy=on_policy, num_updates=updates) == expected


@pytest.mark.parametrize("loss", [PPOLossConfig(), DPPOLossConfig()])
def test_weights_that_were_asked_for_are_applied_to_every_step(loss: LossConfig) -> None:
    """Against the engine they would be left out, in all steps that need them most."""
    config = CorrectionConfig(rollout_is="token")
    for on_policy, updates, expected in ((True, 1, "current"), (False, 1, "current"), (False, 2, "proximal")):
        assert old_policy(config, loss, on_policy=on_policy, num_updates=updates) == expected
    assert old_policy(config, PGLossConfig(), on_policy=False, num_updates=2) == "engine"


def test_dppo_is_against_the_engine_unless_it_is_decoupled() -> None:
    assert old_policy(CorrectionConfig(), DPPOLossConfig(), on_policy=True, num_updates=1) == "engine"
    decoupled = CorrectionConfig(bypass_mode=False)
    assert old_policy(decoupled, DPPOLossConfig(), on_policy=True, num_updates=1) == "current"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_configuration_without_problems(name: str) -> None:
    PRESETS[name].check()


@pytest.fixture(scope="module")
def warm() -> None:
    """What torch does in a process for the first time takes longer than an example may."""
    for config in PRESETS.values():
        ones = torch.zeros(2)
        tokens = LossTokens(ones, ones, ones, -torch.ones(2), torch.arange(2), on_policy=False, whole_answers=True)
        correct(tokens, config, weighs=True)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", sorted(PRESETS))
@given(rows=st.lists(st.tuples(st.floats(-3000, 0), st.floats(-3000, 0)), min_size=1, max_size=6))
def test_no_finite_logprob_makes_a_weight_that_is_not(name: str, rows: list[tuple[float, float]]) -> None:
    new, engine = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
    answers = torch.arange(len(rows)) // 2
    tokens = LossTokens(new, engine, engine, -torch.ones(len(rows)), answers, on_policy=False, whole_answers=True)
    everything = CorrectionConfig(
        rollout_is="sequence",
        rollout_rs=",".join(REJECTIONS),
        rollout_rs_threshold=",".join("2.0" for _ in REJECTIONS),
        off_policy_mask_threshold=0.5,
    )
    for config in (PRESETS[name], everything):
        found = correct(tokens, config, weighs=True)
        assert found.weights.isfinite().all() and (found.weights >= 0).all()
        assert all(share.isfinite().all() for share in found.shares.values())
