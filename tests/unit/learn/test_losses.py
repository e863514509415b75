import math

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.learn.config import LOSS_NAMES, LossConfig
from penstock.learn.losses import (
    LOSSES,
    LossTerms,
    LossTokens,
    Mismatch,
    answer_weights,
    get_loss,
    policy_gradient,
    ppo,
)


def _tokens(
    ratios: list[float], advantages: list[float], *, on_policy: bool = False, engine: float = -1.0
) -> LossTokens:
    """Tokens whose probability is `ratios` times what the engine recorded."""
    recorded = torch.full((len(ratios),), engine, dtype=torch.float64)
    logprobs = (recorded + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return LossTokens(logprobs, recorded, torch.tensor(advantages, dtype=torch.float64), on_policy)


def _gradient(terms: LossTerms, tokens: LossTokens) -> list[float]:
    [gradient] = torch.autograd.grad(terms.loss.sum(), tokens.logprobs)
    return gradient.tolist()  # type: ignore[no-any-return]


def test_ppo_clips_each_side_with_its_own_bound() -> None:
    # Ratio, advantage: inside; above and good; below and bad; above and bad; below and good.
    tokens = _tokens([1.1, 1.5, 0.5, 1.5, 0.5], [2.0, 2.0, -2.0, -2.0, 2.0])
    terms = ppo(tokens, LossConfig(clip_low=0.2, clip_high=0.28))
    # -1.1*2; -1.28*2 (clipped high); 0.8*2 (clipped low); 1.5*2 (the worse of the two); -0.5*2
    assert terms.loss.tolist() == pytest.approx([-2.2, -2.56, 1.6, 3.0, -1.0])
    assert terms.shares["clip_fraction_high"].tolist() == [0, 1, 0, 0, 0]
    assert terms.shares["clip_fraction_low"].tolist() == [0, 0, 1, 0, 0]
    # d(ratio)/d(logprob) is the ratio; a clipped token has no gradient.
    assert _gradient(terms, tokens) == pytest.approx([-2.2, 0.0, 0.0, 3.0, -1.0])


def test_ppo_on_policy_has_ratio_one_and_the_gradient_of_policy_gradient() -> None:
    tokens = _tokens([1.5, 0.5, 3.0], [1.0, -2.0, 0.5], on_policy=True)
    terms = ppo(tokens, LossConfig())
    assert terms.loss.tolist() == [-1.0, 2.0, -0.5]
    assert _gradient(terms, tokens) == [-1.0, 2.0, -0.5]
    assert _gradient(policy_gradient(tokens, LossConfig()), tokens) == [-1.0, 2.0, -0.5]


def test_the_importance_cap_truncates_the_weight_of_a_token() -> None:
    tokens = _tokens([0.5, 1.0, 4.0], [1.0, 1.0, 1.0], on_policy=True)
    terms = ppo(tokens, LossConfig(importance_cap=2.0))
    assert _gradient(terms, tokens) == pytest.approx([-0.5, -1.0, -2.0])
    assert terms.shares["importance_capped_share"].tolist() == [0, 0, 1]
    assert _gradient(policy_gradient(tokens, LossConfig(importance_cap=2.0)), tokens) == pytest.approx(
        [-0.5, -1.0, -2.0]
    )


def test_ppo_against_the_engine_is_not_weighted_a_second_time() -> None:
    tokens = _tokens([0.9, 1.1], [1.0, 1.0])
    assert ppo(tokens, LossConfig(importance_cap=2.0)).loss.tolist() == ppo(tokens, LossConfig()).loss.tolist()


def test_each_aggregation_weighs_tokens_as_it_says() -> None:
    lengths = np.asarray([1, 3, 0])
    assert answer_weights(lengths, LossConfig()).tolist() == [0.25] * 3
    sequence = answer_weights(lengths, LossConfig(aggregation="sequence-mean"))
    assert sequence[:2].tolist() == pytest.approx([1 / 2, 1 / 6])
    constant = answer_weights(lengths, LossConfig(aggregation="constant", constant_length=10))
    assert constant.tolist() == pytest.approx([1 / 30] * 3)


def test_the_mismatch_is_what_a_hand_computes() -> None:
    mismatch = Mismatch()
    mismatch.add(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]))
    mismatch.add(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.5)]))
    # Ratios 2 and 1: k3 is (2 - 1 - ln 2 + 0) / 2, the sample size (2 + 1)^2 / (2 * (4 + 1)).
    assert mismatch.metrics() == pytest.approx(
        {
            "mismatch/mean_abs": math.log(2) / 2,
            "mismatch/max_abs": math.log(2),
            "mismatch/k3_kl": (1 - math.log(2)) / 2,
            "mismatch/ess": 0.9,
        },
        rel=1e-6,
    )


def test_the_mismatch_of_an_absurd_token_is_large_and_finite() -> None:
    mismatch = Mismatch()
    mismatch.add(torch.tensor([-1.0, -1.0]), torch.tensor([-2000.0, -1.0]))
    assert all(math.isfinite(value) for value in mismatch.metrics().values())


def test_the_configuration_knows_every_loss() -> None:
    assert set(LOSS_NAMES) == set(LOSSES)


def test_a_loss_may_be_given_by_its_dotted_path() -> None:
    assert get_loss("penstock.learn.losses.ppo") is ppo
    with pytest.raises(ConfigError, match="cannot be imported"):
        get_loss("penstock.learn.losses.nothing")


def test_a_bad_token_that_became_far_more_likely_cannot_outweigh_the_others() -> None:
    tokens = _tokens([2.0, 190.0, 190.0], [-1.0, -1.0, 1.0])
    capped = ppo(tokens, LossConfig(ratio_cap=3.0))
    assert capped.loss.tolist() == pytest.approx([2.0, 3.0, -1.2])
    assert _gradient(capped, tokens) == pytest.approx([2.0, 0.0, 0.0])
    assert _gradient(ppo(tokens, LossConfig(ratio_cap=None)), tokens) == pytest.approx([2.0, 190.0, 0.0])


@pytest.mark.parametrize("cap", [3.0, None])
@pytest.mark.parametrize("difference", [89.0, 1000.0, -1000.0])
def test_a_log_ratio_that_no_number_holds_has_a_finite_gradient(difference: float, cap: float | None) -> None:
    recorded = torch.tensor([-1000.0, -1000.0])
    logprobs = (recorded + difference).requires_grad_()
    tokens = LossTokens(logprobs, recorded, torch.tensor([1.0, -1.0]), on_policy=False)
    terms = ppo(tokens, LossConfig(ratio_cap=cap))
    assert terms.loss.isfinite().all()
    assert _gradient(terms, tokens) == [0.0, 0.0]
