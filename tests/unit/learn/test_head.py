"""Logprobs and their gradient from hidden states, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.learn import head as head_module
from penstock.learn.head import apply_head, apply_plain_head
from penstock.learn.linear import Gradients, JoinedLinear, Spare

TOKENS, HIDDEN, VOCAB = 48, 96, 400


def _confident(margin: float) -> tuple[torch.nn.Linear, Tensor, Tensor, Tensor]:
    """A head, hidden states that point at their targets, the targets, and how much each logprob counts."""
    generator = torch.Generator().manual_seed(3)
    linear = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5)
        targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
        hidden = margin * linear.weight[targets] + torch.randn(TOKENS, HIDDEN, generator=generator)
    counts = torch.randn(TOKENS, generator=generator)
    return linear, hidden, targets, counts


def _gradients(
    linear: torch.nn.Linear, hidden: Tensor, targets: Tensor, counts: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, the gradient of the hidden states and that of the head, for operands of this dtype."""
    gradients = Gradients()
    gradients.clear([linear.weight])
    joined = JoinedLinear([linear], dtype, gradients)
    joined.refresh()
    leaf = hidden.clone().requires_grad_()
    logprobs = apply_head(leaf, joined, targets, torch.ones(TOKENS)).logprobs
    (logprobs * counts).sum().backward()
    assert leaf.grad is not None
    assert linear.weight.grad is not None
    return logprobs.detach(), leaf.grad, linear.weight.grad.clone()


def _reference(
    linear: torch.nn.Linear, hidden: Tensor, targets: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weight, leaf = linear.weight.detach().double().requires_grad_(), hidden.double().requires_grad_()
    logprobs = (leaf @ weight.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (logprobs * counts.double()).sum().backward()
    assert leaf.grad is not None
    assert weight.grad is not None
    return logprobs.detach(), leaf.grad, weight.grad


@pytest.mark.parametrize("margin", [14.0, 18.0, 24.0])
def test_in_bfloat16_the_gradient_of_confident_tokens_is_no_noise(margin: float) -> None:
    """p - 1 is what is left of two nearly equal numbers: it has to be one before it is rounded."""
    case = _confident(margin)
    logprobs, *exact = _reference(*case)
    assert logprobs.exp().median() > 0.99
    _, *found = _gradients(*case, torch.bfloat16)
    for ours, theirs in zip(found, exact, strict=True):
        error = (ours - theirs).norm() / theirs.norm()
        cosine = torch.cosine_similarity(ours.double().flatten(), theirs.flatten(), dim=0)
        assert error < 0.1
        assert cosine > 0.995


@pytest.mark.parametrize("kept_bytes", [head_module.KEPT_BYTES, 7 * VOCAB * 4])
@pytest.mark.parametrize("margin", [0.0, 4.0, 18.0])
def test_in_float32_logprobs_and_gradient_are_exact(
    margin: float, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 5 * VOCAB * 4)
    case = _confident(margin)
    (logprobs, *found), (expected, *exact) = _gradients(*case, torch.float32), _reference(*case)
    torch.testing.assert_close(logprobs, expected.float(), atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def _with_entropy(
    linear: torch.nn.Linear, hidden: Tensor, targets: Tensor, counts: Tensor, *, plain: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, and the gradients of (counts * logprob + 0.3 * counts^2 * entropy) by hidden states and head."""
    gradients, temperatures = Gradients(), torch.linspace(0.5, 1.5, TOKENS)
    gradients.clear([linear.weight])
    joined = JoinedLinear([linear], dtype, gradients)
    joined.refresh()
    leaf = hidden.clone().requires_grad_()
    computed = (
        apply_plain_head(leaf, linear, targets, temperatures, entropy_gradient=True)
        if plain
        else apply_head(leaf, joined, targets, temperatures, entropy_gradient=True)
    )
    (counts * computed.logprobs + 0.3 * counts.square() * computed.entropy).sum().backward()
    assert leaf.grad is not None and linear.weight.grad is not None
    return computed.entropy.detach(), leaf.grad, linear.weight.grad.clone()


def _entropy_reference(
    linear: torch.nn.Linear, hidden: Tensor, targets: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weight, leaf = linear.weight.detach().double().requires_grad_(), hidden.double().requires_grad_()
    distribution = torch.distributions.Categorical(logits=leaf @ weight.t() / torch.linspace(0.5, 1.5, TOKENS)[:, None])
    entropy, counts = distribution.entropy(), counts.double()
    (counts * distribution.log_prob(targets) + 0.3 * counts.square() * entropy).sum().backward()
    assert leaf.grad is not None and weight.grad is not None
    return entropy.detach(), leaf.grad, weight.grad


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("margin", [0.0, 4.0])
def test_the_entropy_has_a_gradient_where_a_bonus_asks_for_it(
    margin: float, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 5 * VOCAB * 4)
    case = _confident(margin)
    (entropy, *found), (expected, *exact) = (
        _with_entropy(*case, plain=plain, dtype=torch.float32),
        _entropy_reference(*case),
    )
    torch.testing.assert_close(entropy, expected.float(), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_in_bfloat16_the_gradient_of_the_entropy_is_nearly_exact() -> None:
    case = _confident(4.0)
    (_, *found), (_, *exact) = _with_entropy(*case, plain=False, dtype=torch.bfloat16), _entropy_reference(*case)
    for ours, theirs in zip(found, exact, strict=True):
        assert torch.cosine_similarity(ours.double().flatten(), theirs.flatten(), dim=0) > 0.995


def test_without_a_bonus_the_entropy_has_no_gradient() -> None:
    linear, hidden, targets, _ = _confident(0.0)
    for apply in (apply_plain_head, apply_head):
        head = linear if apply is apply_plain_head else JoinedLinear([linear], torch.float32, Gradients())
        computed = apply(hidden.clone().requires_grad_(), head, targets, torch.ones(TOKENS))  # type: ignore[operator]
        assert computed.logprobs.requires_grad and not computed.entropy.requires_grad


def test_memory_that_was_given_back_is_used_again_and_never_by_two() -> None:
    spare = Spare()
    first = spare.take(4, 10, torch.float32, torch.device("cpu"))
    second = spare.take(4, 10, torch.float32, torch.device("cpu"))
    assert first.data_ptr() != second.data_ptr()
    spare.give_back(first)
    smaller = spare.take(3, 10, torch.float32, torch.device("cpu"))
    assert smaller.data_ptr() == first.data_ptr() and smaller.shape == (3, 10)
    spare.give_back(smaller)
    assert spare.take(4, 10, torch.float32, torch.device("cpu")).data_ptr() == first.data_ptr(), "all of it came back"
    spare.give_back(second)
    assert spare.take(5, 10, torch.float32, torch.device("cpu")).shape == (5, 10), "too small is no reason to fail"
    assert spare.take(4, 10, torch.bfloat16, torch.device("cpu")).dtype == torch.bfloat16
