"""Estimators of the KL, as the loss and as the reward see them."""

import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_tokens import Array, by_differences, gradient, make_tokens, random_tokens

from penstock.learn.kl import kl_of_sampled, kl_of_tokens

Kind = Literal["k1", "k2", "k3", "k3+"]
KINDS: list[Kind] = ["k1", "k2", "k3", "k3+"]


def by_hand(kind: Kind, d: Array) -> Array:
    """d = log p - log reference, sampled from p; r = reference / p."""
    r = np.exp(-d)
    return {"k1": -np.log(r), "k2": np.log(r) ** 2 / 2, "k3": r - 1 - np.log(r), "k3+": r - 1 - np.log(r)}[kind]


def slope(kind: Kind, d: Array) -> Array:
    """By log p."""
    return {"k1": np.ones_like(d), "k2": d, "k3": 1 - np.exp(-d), "k3+": d}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_each_estimator_has_the_value_and_the_gradient_of_its_formula(kind: Kind) -> None:
    columns = random_tokens(3)
    logprobs, reference = columns["logprobs"], columns["reference"]
    leaf = torch.tensor(logprobs).requires_grad_()
    found = kl_of_tokens(leaf, torch.tensor(reference), kind)
    np.testing.assert_allclose(found.detach(), by_hand(kind, logprobs - reference), rtol=1e-6)
    [gradient] = torch.autograd.grad(found.sum(), leaf)
    np.testing.assert_allclose(gradient, slope(kind, logprobs - reference), rtol=1e-6)
    recorded = kl_of_sampled(logprobs.astype(np.float32), reference.astype(np.float32), kind)
    np.testing.assert_allclose(recorded, by_hand(kind, logprobs - reference), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_values_are_right_on_average(kind: Kind) -> None:
    p, q = np.asarray([0.7, 0.2, 0.1]), np.asarray([0.4, 0.4, 0.2])
    expected = float((p * np.log(p / q)).sum())
    assert float((p * by_hand(kind, np.log(p / q))).sum()) == pytest.approx(expected)


def test_the_gradient_of_k2_is_right_on_average_and_that_of_k3_is_not() -> None:
    """E[slope * score function] against the gradient of the true KL by the logits."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    p = logits.softmax(0)
    [exact] = torch.autograd.grad((p * (p / q).log()).sum(), logits)
    probabilities = p.detach().numpy()
    d = np.log(probabilities / q.numpy())
    scores = np.eye(3) - probabilities  # d log p[token] / d logits
    on_average = {kind: (probabilities * slope(kind, d)) @ scores for kind in KINDS}
    np.testing.assert_allclose(on_average["k2"], exact, rtol=1e-9)
    np.testing.assert_allclose(on_average["k3+"], exact, rtol=1e-9)
    assert np.abs(on_average["k3"] - exact.numpy()).max() > 0.05
    assert np.abs(on_average["k1"]).max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@given(pair=st.tuples(st.floats(-3000, 0), st.floats(-3000, 0)))
def test_it_is_finite_for_any_two_logprobs(kind: Kind, pair: tuple[float, float]) -> None:
    leaf = torch.tensor([pair[0]], dtype=torch.float32).requires_grad_()
    value = kl_of_tokens(leaf, torch.tensor([pair[1]]), kind)
    [gradient] = torch.autograd.grad(value.sum(), leaf)
    assert math.isfinite(value.item()) and math.isfinite(gradient.item())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_each_gradient_is_that_of_finite_differences(kind: Kind) -> None:
    """In float64; `k3+` has that of k2 on purpose."""
    columns = random_tokens(5)
    tokens, reference = make_tokens(**columns), torch.tensor(columns["reference"])
    found = gradient(kl_of_tokens(tokens.logprobs, reference, kind), tokens)
    by_value = by_differences(lambda moved: kl_of_tokens(moved.logprobs, reference, kind), tokens)
    np.testing.assert_allclose(found, by_value, rtol=1e-5, atol=1e-6)
