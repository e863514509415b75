"""bfloat16 copies that move with their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.models.rounding import copy_weights, rounded


def neighbours(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers around each, towards zero and away from it."""
    toward = (weights.view(torch.int32) & -65536).view(torch.float32)
    away = ((weights.view(torch.int32) + 65535) & -65536).view(torch.float32)
    return toward, away


@pytest.mark.parametrize("shape", [(3,), (7, 11), (1200, 900)])
def test_every_weight_becomes_one_of_its_two_neighbours_and_always_the_same(shape: tuple[int, ...]) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    copy = rounded(weights)
    toward, away = neighbours(weights)
    assert ((copy.float() == toward) | (copy.float() == away)).all()
    assert torch.equal(copy, rounded(weights.clone()))
    assert torch.equal(copy, copy_weights(weights, torch.zeros(shape, dtype=torch.bfloat16)))


def test_what_bfloat16_can_say_is_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(600, 600, generator=generator).bfloat16()
    weights[0, :4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    assert torch.equal(rounded(weights.float()).view(torch.int16), weights.view(torch.int16))
    assert rounded(torch.full((50,), torch.nan)).isnan().all()
    assert rounded(weights) is weights
    assert torch.equal(rounded(weights.float(), torch.float32), weights.float())


def test_the_layout_and_the_dtype_of_the_source_do_not_matter() -> None:
    weights = torch.randn(60, 50, generator=torch.Generator().manual_seed(0)).half()
    copy = rounded(weights.float())
    assert torch.equal(rounded(weights), copy)
    assert torch.equal(rounded(weights.t().contiguous().t()), copy)
    wide = torch.zeros(60, 70, dtype=torch.bfloat16)
    copy_weights(weights, wide[:, :50])
    assert torch.equal(wide[:, :50], copy)
    assert not wide[:, 50:].any()


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
def test_a_copy_is_its_weights_on_the_average_and_moves_as_much(source: torch.dtype) -> None:
    weights = torch.empty(1000, 1000).uniform_(1.1, 1.9, generator=torch.Generator().manual_seed(0)).to(source).float()
    spacing = 2.0**-7
    assert (rounded(weights).double() - weights).mean().abs() < 1e-3 * spacing
    for share in (-0.3, -0.01, 0.01, 0.3):
        moved = (rounded(weights + share * spacing).double() - rounded(weights).double()) / spacing
        assert set(moved.unique().tolist()) == {0.0, 1.0 if share > 0 else -1.0}
        assert moved.mean().item() == pytest.approx(share, rel=0.05)


def policy(model: Any, weights: dict[str, Tensor], ids: Tensor, *, copies: bool) -> Tensor:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(rounded(weights[name]).float() if copies and parameter.dim() > 1 else weights[name])
        return model(ids).logits.double().log_softmax(-1)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_after_a_small_update_the_policy_of_the_copies_is_as_near_as_that_of_the_weights(source: torch.dtype) -> None:
    """Rounded to the nearest it is 220 times as far (float16), or has not moved at all (bfloat16)."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.05}
    shape = {"vocab_size": 97, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval().to(source).float()
    ids = torch.randint(97, (8, 16))
    logprobs = model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    (logprobs * torch.randn(8, 1)).mean().backward()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # What Adam does first.
    after = {name: before[name] + 1e-6 * parameter.grad.sign() for name, parameter in model.named_parameters()}

    def moved(*, copies: bool) -> float:
        first, second = (policy(model, weights, ids, copies=copies) for weights in (before, after))
        return (first.exp() * (first - second)).sum(-1).mean().item()

    exact = moved(copies=False)
    assert exact > 0
    assert exact / 3 < moved(copies=True) < 3 * exact
