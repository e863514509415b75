"""The plain way leaves gradients to autograd: the same numbers as the fused one, and hooks and frozen weights count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.learn import head as head_module
from penstock.learn.batch import BatchSettings, prepare_batch
from penstock.learn.fused import FusedModel
from penstock.learn.head import apply_plain_head
from penstock.learn.linear import Gradients
from penstock.learn.logprobs import PlainModel
from penstock.learn.pack import pack
from penstock.rollout import Group


def _gradient(model: Any, way: Any, groups: list[Group], *, max_tokens: int = 60) -> dict[str, torch.Tensor]:
    batch = prepare_batch(groups, train_step=1, settings=BatchSettings(temperatures={"": 0.7}))
    model.zero_grad(set_to_none=True)
    for micro_batch in pack(batch, max_tokens=max_tokens, share_prompts=way.share_prompts, one_row=way.one_row):
        computed = way.logprobs(micro_batch)
        (computed.logprobs * torch.from_numpy(micro_batch.advantages)).sum().div(50).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [True, False])
def test_the_plain_way_gives_the_gradient_of_the_fused_one(
    tiny_model: Callable[..., Any], random_groups: Callable[..., list[Group]], tied: bool
) -> None:
    model, groups = tiny_model("qwen3", tied=tied), random_groups(5, num_groups=3)
    fused = _gradient(model, FusedModel(model, Gradients(), torch.float32), groups)
    plain = _gradient(model, PlainModel(model, share_prompts=True), groups)
    assert plain.keys() == fused.keys()
    for name, gradient in fused.items():
        torch.testing.assert_close(plain[name], gradient, atol=1e-6, rtol=1e-5)


def test_a_hook_on_the_head_and_a_frozen_embedding_are_respected(
    tiny_model: Callable[..., Any], random_groups: Callable[..., list[Group]]
) -> None:
    model, groups = tiny_model("llama", tied=False), random_groups(6, num_groups=2)
    plain = PlainModel(model, share_prompts=True)
    before = _gradient(model, plain, groups)
    model.get_input_embeddings().weight.requires_grad_(False)
    model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    after = _gradient(model, plain, groups)
    assert seen
    assert before.keys() - after.keys() == {"model.embed_tokens.weight"}
    torch.testing.assert_close(after["lm_head.weight"], 2 * before["lm_head.weight"])


def test_logits_that_are_made_again_in_the_backward_pass_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    head = torch.nn.Linear(8, 30, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(30, 8, generator=generator))
    hidden, targets = torch.randn(17, 8, generator=generator), torch.randint(30, (17,), generator=generator)

    def run() -> tuple[torch.Tensor, ...]:
        leaf = hidden.clone().requires_grad_()
        computed = apply_plain_head(leaf, head, targets, torch.full((len(leaf),), 1.3))
        head.weight.grad = None
        computed.logprobs.square().sum().backward()
        assert leaf.grad is not None
        assert head.weight.grad is not None
        return computed.logprobs.detach(), computed.entropy, leaf.grad, head.weight.grad

    whole = run()
    monkeypatch.setattr(head_module, "KEPT_BYTES", 30 * 4 * 5)
    for expected, found in zip(whole, run(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    distribution = torch.distributions.Categorical(logits=hidden @ head.weight.t() / 1.3)
    torch.testing.assert_close(whole[0], distribution.log_prob(targets))
    torch.testing.assert_close(whole[1], distribution.entropy())
