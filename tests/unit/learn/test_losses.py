"""Every loss against numpy written from its paper's formula, its gradient against finite differences, and the edges."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_tokens import Array, by_differences, gradient, make_tokens, random_tokens

from penstock.errors import ConfigError
from penstock.learn.losses import (
    LOSSES,
    CISPOLossConfig,
    CustomLossConfig,
    DPPOLossConfig,
    GSPOLossConfig,
    LossConfig,
    LossTerms,
    LossTokens,
    PGLossConfig,
    PPOLossConfig,
    answer_weights,
)
from penstock.learn.mismatch import Mismatch


def with_ratios(ratios: list[float], advantages: list[float], *, on_policy: bool = False) -> LossTokens:
    """Tokens whose probability is `ratios` times what it was."""
    old = np.full(len(ratios), -1.0)
    return make_tokens(old + np.log(ratios), old, np.asarray(advantages), on_policy=on_policy)


# Written from the papers: one number per token.


def by_hand_ppo(t: dict[str, Array], low: float, high: float, cap: float | None) -> Array:
    losses = []
    for new, old, advantage in zip(t["logprobs"], t["old"], t["advantages"], strict=True):
        ratio = math.exp(new - old)
        objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if cap is not None and advantage < 0:
            objective = max(objective, cap * advantage)
        losses.append(-objective)
    return np.asarray(losses)


def by_hand_gspo(t: dict[str, Array], low: float, high: float) -> Array:
    losses = np.zeros(len(t["logprobs"]))
    for answer in set(t["answers"]):
        of_answer = t["answers"] == answer
        s = math.exp((t["logprobs"] - t["old"])[of_answer].sum() / of_answer.sum())
        for place in np.flatnonzero(of_answer):
            advantage = t["advantages"][place]
            losses[place] = -min(s * advantage, min(max(s, 1 - low), 1 + high) * advantage)
    return losses


def by_hand_cispo(t: dict[str, Array], cap: float) -> Array:
    return -np.minimum(np.exp(t["logprobs"] - t["old"]), cap) * t["advantages"] * t["logprobs"]


def by_hand_dppo(t: dict[str, Array], low: float, high: float, kl_coef: float) -> Array:
    ratio, moved = np.exp(t["logprobs"] - t["old"]), np.exp(t["logprobs"]) - np.exp(t["old"])
    kept = np.where(t["advantages"] > 0, moved <= high, np.where(t["advantages"] < 0, moved >= -low, True))
    return np.where(kept, -ratio * t["advantages"], 0.0) + kl_coef * (t["logprobs"] - t["old"]) ** 2


def by_hand_pg(t: dict[str, Array]) -> Array:
    return -t["advantages"] * t["logprobs"]


CASES: list[tuple[LossConfig, Any]] = [
    (PPOLossConfig(), lambda t: by_hand_ppo(t, 0.2, 0.2, 3.0)),
    (PPOLossConfig(clip_high=0.28, ratio_cap=None), lambda t: by_hand_ppo(t, 0.2, 0.28, None)),
    (GSPOLossConfig(), lambda t: by_hand_gspo(t, 3e-4, 4e-4)),
    (GSPOLossConfig(clip_low=0.1, clip_high=0.3), lambda t: by_hand_gspo(t, 0.1, 0.3)),
    (CISPOLossConfig(), lambda t: by_hand_cispo(t, 5.0)),
    (CISPOLossConfig(ratio_cap=1.5), lambda t: by_hand_cispo(t, 1.5)),
    (DPPOLossConfig(), lambda t: by_hand_dppo(t, 0.2, 0.2, 1e-3)),
    (DPPOLossConfig(mask_low=0.05, mask_high=0.1, kl_coef=0.1), lambda t: by_hand_dppo(t, 0.05, 0.1, 0.1)),
    (PGLossConfig(), by_hand_pg),
]
NAMES = [f"{type(config).__name__}-{number}" for number, (config, _) in enumerate(CASES)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("config", "by_hand"), CASES, ids=NAMES)
def test_each_loss_is_its_papers_formula(config: LossConfig, by_hand: Any, seed: int) -> None:
    columns = random_tokens(seed)
    found = config.build()(make_tokens(**columns)).loss.detach().numpy()
    np.testing.assert_allclose(found, by_hand(columns), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("config", "_"), [c for c in CASES if not isinstance(c[0], CISPOLossConfig)])
def test_each_gradient_is_that_of_finite_differences(config: LossConfig, _: Any, seed: int) -> None:
    # Ratios that are not absurd, and none at a bound: there a difference sees both sides.
    columns = random_tokens(seed, spread=0.05 if isinstance(config, GSPOLossConfig) else 0.4)
    columns["old"][:2] = columns["logprobs"][:2] - 0.03
    tokens = make_tokens(**columns)
    if isinstance(config, GSPOLossConfig):
        # As a function of all tokens of the answer, which its value is.
        def total(moved: LossTokens) -> torch.Tensor:
            s = moved.mean_over_answer(moved.log_ratio).exp()
            clipped = s.clamp(1 - config.clip_low, 1 + config.clip_high)
            return -(s * moved.advantages).minimum(clipped * moved.advantages)
    else:
        total = lambda moved: config.build()(moved).loss  # noqa: E731
    found = gradient(config.build()(tokens).loss, tokens)
    np.testing.assert_allclose(found, by_differences(total, tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cap", [5.0, 1.1])
def test_the_weight_of_cispo_has_no_gradient_and_every_token_has_one(cap: float) -> None:
    columns = random_tokens(1)
    tokens = make_tokens(**columns)
    found = gradient(CISPOLossConfig(ratio_cap=cap).build()(tokens).loss, tokens)
    weights = np.minimum(np.exp(columns["logprobs"] - columns["old"]), cap)
    np.testing.assert_allclose(found, -weights * columns["advantages"], rtol=1e-6)


def test_cispo_does_not_raise_a_small_ratio() -> None:
    tokens = with_ratios([0.01, 100.0], [1.0, 1.0])
    terms = CISPOLossConfig().build()(tokens)
    assert gradient(terms.loss, tokens).tolist() == pytest.approx([-0.01, -5.0])
    assert terms.shares["clip_fraction_high"].tolist() == [0, 1]


def test_ppo_clips_each_side_with_its_own_bound() -> None:
    # Ratio, advantage: inside; above and good; below and bad; above and bad; below and good.
    tokens = with_ratios([1.1, 1.5, 0.5, 1.5, 0.5], [2.0, 2.0, -2.0, -2.0, 2.0])
    terms = PPOLossConfig(clip_low=0.2, clip_high=0.28).build()(tokens)
    # -1.1*2; -1.28*2 (clipped high); 0.8*2 (clipped low); 1.5*2 (the worse of the two); -0.5*2
    assert terms.loss.tolist() == pytest.approx([-2.2, -2.56, 1.6, 3.0, -1.0])
    assert terms.shares["clip_fraction_high"].tolist() == [0, 1, 0, 0, 0]
    assert terms.shares["clip_fraction_low"].tolist() == [0, 0, 1, 0, 0]
    # d(ratio)/d(logprob) is the ratio; a clipped token has no gradient.
    assert gradient(terms.loss, tokens).tolist() == pytest.approx([-2.2, 0.0, 0.0, 3.0, -1.0])


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "dppo", "pg"])
def test_on_policy_every_loss_has_the_gradient_of_the_policy_gradient(name: str) -> None:
    tokens = with_ratios([1.5, 0.5, 3.0], [1.0, -2.0, 0.5], on_policy=True)
    assert gradient(LOSSES[name]().build()(tokens).loss, tokens).tolist() == pytest.approx([-1.0, 2.0, -0.5])


def test_a_bad_token_that_became_far_more_likely_cannot_outweigh_the_others() -> None:
    tokens = with_ratios([2.0, 190.0, 190.0], [-1.0, -1.0, 1.0])
    capped = PPOLossConfig(ratio_cap=3.0).build()(tokens)
    assert capped.loss.tolist() == pytest.approx([2.0, 3.0, -1.2])
    assert capped.shares["clip_fraction_dual"].tolist() == [0, 1, 0]
    assert gradient(capped.loss, tokens).tolist() == pytest.approx([2.0, 0.0, 0.0])
    uncapped = PPOLossConfig(ratio_cap=None).build()(tokens)
    assert gradient(uncapped.loss, tokens).tolist() == pytest.approx([2.0, 190.0, 0.0])


def test_gspo_clips_answers_and_not_tokens() -> None:
    # Ratios 2 and 1/2 in one answer: its mean log-ratio is 0, and nothing is clipped.
    logprobs, old = np.log([0.5, 0.25, 0.5, 0.5]), np.log([0.25, 0.5, 0.25, 0.25])
    tokens = make_tokens(logprobs, old, np.ones(4), np.asarray([0.0, 0, 1, 1]))
    terms = GSPOLossConfig().build()(tokens)
    assert terms.loss.tolist() == pytest.approx([-1, -1, -1.0004, -1.0004])
    assert gradient(terms.loss, tokens).tolist() == pytest.approx([-1.0, -1.0, 0.0, 0.0])


def test_dppo_masks_by_how_far_the_probability_moved_to_where_it_is_pushed() -> None:
    # A rare token with a ratio of 3; a likely one with 0.5, pushed down; the same, pushed up.
    old, new = np.log([1e-4, 0.9, 0.9]), np.log([3e-4, 0.45, 0.45])
    terms = DPPOLossConfig(kl_coef=0.0).build()(tokens := make_tokens(new, old, np.asarray([1.0, -1.0, 1.0])))
    assert gradient(terms.loss, tokens).tolist() == pytest.approx([-3.0, 0.0, -0.5])
    assert terms.shares["clip_fraction_low"].tolist() == [0, 1, 0]


def test_answers_that_may_be_split_cannot_be_averaged_over() -> None:
    tokens = make_tokens(np.zeros(2) - 1, np.zeros(2) - 1, np.ones(2))
    split = LossTokens(**{**vars(tokens), "whole_answers": False})
    with pytest.raises(ValueError, match=r"whole_answers=True\) keeps it whole"):
        GSPOLossConfig().build()(split)


logprob = st.floats(-2000, 0)
advantage = st.floats(-1e3, 1e3)


@pytest.mark.parametrize(("config", "_"), CASES, ids=NAMES)
@given(rows=st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=6))
def test_no_finite_token_makes_a_loss_or_a_gradient_that_is_not(
    config: LossConfig, _: Any, rows: list[tuple[float, float, float]]
) -> None:
    new, old, advantages = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
    logprobs = new.requires_grad_()
    answers = torch.arange(len(rows)) // 2
    tokens = LossTokens(logprobs, old, old, advantages, answers, on_policy=False, whole_answers=True)
    terms = config.build()(tokens)
    assert terms.loss.isfinite().all()
    [found] = torch.autograd.grad(terms.loss.sum(), logprobs)
    assert found.isfinite().all()


@pytest.mark.parametrize("cap", [3.0, None])
@pytest.mark.parametrize("difference", [89.0, 1000.0, -1000.0])
def test_a_log_ratio_that_no_number_holds_has_a_finite_gradient(difference: float, cap: float | None) -> None:
    old = np.full(2, -1000.0)
    tokens = make_tokens(old + difference, old, np.asarray([1.0, -1.0]))
    terms = PPOLossConfig(ratio_cap=cap).build()(tokens)
    assert terms.loss.isfinite().all()
    assert gradient(terms.loss, tokens).tolist() == [0.0, 0.0]


# How tokens become one number.


def test_each_aggregation_weighs_tokens_as_it_says() -> None:
    lengths = np.asarray([1, 3, 0])
    assert answer_weights(lengths, PPOLossConfig()).tolist() == [0.25] * 3
    sequence = answer_weights(lengths, PPOLossConfig(aggregation="sequence-mean"))
    assert sequence[:2].tolist() == pytest.approx([1 / 2, 1 / 6])
    constant = answer_weights(lengths, PPOLossConfig(aggregation="constant", constant_length=10))
    assert constant.tolist() == pytest.approx([1 / 30] * 3)


def test_gspo_averages_over_answers() -> None:
    assert GSPOLossConfig().aggregation == "sequence-mean"


def test_the_mismatch_is_what_a_hand_computes() -> None:
    mismatch = Mismatch()
    mismatch.add(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]))
    other = Mismatch()
    other.add(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.5)]))
    # Ratios 2 and 1: k3 is (2 - 1 - ln 2 + 0) / 2, the sample size (2 + 1)^2 / (2 * (4 + 1)).
    assert (mismatch + other).metrics() == pytest.approx(
        {
            "mismatch/mean_abs": math.log(2) / 2,
            "mismatch/max_abs": math.log(2),
            "mismatch/kl": -math.log(2) / 2,
            "mismatch/k3_kl": (1 - math.log(2)) / 2,
            "mismatch/ratio_min": 1.0,
            "mismatch/ratio_max": 2.0,
            "mismatch/ess": 0.9,
        },
        rel=1e-6,
    )


def test_the_mismatch_of_an_absurd_token_is_large_and_finite() -> None:
    mismatch = Mismatch()
    mismatch.add(torch.tensor([-1.0, -1.0]), torch.tensor([-2000.0, -1.0]))
    assert all(math.isfinite(value) for value in mismatch.metrics().values())


def half_of_the_mean(tokens: LossTokens, how: CustomLossConfig) -> LossTerms:
    return LossTerms(how.arguments["share"] * tokens.mean_over_answer(tokens.logprobs))


def test_a_loss_of_the_users_has_its_arguments_and_whole_answers() -> None:
    config = CustomLossConfig(function=f"{__name__}:half_of_the_mean", arguments={"share": 0.5}, whole_answers=True)
    config.check()
    tokens = make_tokens(np.asarray([-1.0, -3.0]), np.zeros(2), np.ones(2))
    assert config.build()(tokens).loss.tolist() == [-1.0, -1.0]
    with pytest.raises(ConfigError, match="cannot be imported"):
        CustomLossConfig(function="penstock.learn.losses.nothing").check()
