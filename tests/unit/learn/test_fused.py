import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from penstock.learn.batch import BatchSettings, TrainBatch, prepare_batch
from penstock.learn.fused import FusedModel, can_fuse
from penstock.learn.linear import Gradients
from penstock.learn.load import LogprobModel
from penstock.learn.logprobs import PlainModel
from penstock.learn.pack import pack
from penstock.models.cores import WINDOW_S, Reading, ThreadCount
from penstock.models.rounding import rounded
from penstock.models.threads import Pace, Team
from penstock.rollout import Group

RandomGroups = Callable[..., list[Group]]
ModelOf = Callable[..., Any]
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}


def _randomize(model: Any) -> Any:
    """Norms and biases begin as ones and zeros, which would hide a mistake in them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def _step(
    model: Any, way: LogprobModel, batch: TrainBatch, max_tokens: int
) -> tuple[dict[int, tuple[float, float]], dict[str, Any]]:
    """Logprob and entropy of every trained token, and the gradient of the logprobs weighted by advantages."""
    model.zero_grad()
    found: dict[int, tuple[float, float]] = {}
    for micro in pack(batch, max_tokens=max_tokens, share_prompts=way.share_prompts, one_row=way.one_row):
        computed = way.logprobs(micro)
        (computed.logprobs * torch.from_numpy(micro.advantages)).sum().backward()
        pairs = zip(computed.logprobs.tolist(), computed.entropy.tolist(), strict=True)
        found |= dict(zip(micro.token_index.tolist(), pairs, strict=True))
    return found, {name: p.grad.clone() for name, p in model.named_parameters()}


def _long_and_short(random_groups: RandomGroups) -> TrainBatch:
    """Answers of 1 to 60 tokens, so that attention has rows of several lengths; one group with holes in its mask."""
    groups = [*random_groups(3, num_groups=4), *random_groups(5, num_groups=2, longest=60)]
    batch = prepare_batch(groups, train_step=1, settings=BatchSettings(temperatures={"": 0.7}))
    rng = np.random.default_rng(0)
    holed = []
    for answer in batch.groups[0].answers:
        [segment] = answer.segments
        mask = (rng.random(len(segment)) < 0.7).astype(np.uint8)
        holed.append(replace(answer, segments=[replace(segment, mask=mask)]))
    return replace(batch, groups=[*batch.groups[1:], replace(batch.groups[0], answers=holed)])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_fused_passes_have_the_logprobs_and_the_gradient_of_transformers(
    tiny_model: ModelOf, random_groups: RandomGroups, kind: str, tied: bool
) -> None:
    model = _randomize(tiny_model(kind, tied=tied))
    assert can_fuse(model)
    batch = _long_and_short(random_groups)
    expected, gradient = _step(model, PlainModel(model, share_prompts=False), batch, 10_000)
    ways = [
        (FusedModel(model, Gradients(), torch.float32), 10_000),
        (FusedModel(model, Gradients(), torch.float32), 100),
        (FusedModel(model, Gradients(), torch.float32, share_prompts=False), 300),
        (FusedModel(model, Gradients(), torch.float32, activation_checkpointing=True), 300),
    ]
    for way, max_tokens in ways:
        found, fused_gradient = _step(model, way, batch, max_tokens)
        assert found.keys() == expected.keys()
        for token, pair in found.items():
            assert pair == pytest.approx(expected[token], abs=1e-4)
        for name, value in fused_gradient.items():
            largest = float(gradient[name].abs().max())
            assert float((value - gradient[name]).abs().max()) <= 1e-4 * largest, name


@pytest.mark.parametrize("way", ["fused", "checkpointed", "plain"])
def test_beside_a_busy_process_one_thread_less_computes_the_same(
    tiny_model: ModelOf, random_groups: RandomGroups, way: str
) -> None:
    """The machine is a recording: another process takes a core from the third look on."""
    looks = 0

    def read() -> Reading:
        nonlocal looks
        looks += 1
        others = max(0, looks - 2)
        return Reading(at=2 * WINDOW_S * looks, busy=4 * WINDOW_S * looks, own=2 * WINDOW_S * (2 * looks - others))

    model = _randomize(tiny_model("llama"))
    batch = _long_and_short(random_groups)
    pace = Pace(Team(ThreadCount(2, cores=2), read), clock=itertools.count(0.0, WINDOW_S).__next__)
    ways: dict[str, LogprobModel] = {
        "fused": FusedModel(model, Gradients(), torch.float32, pace=pace),
        "checkpointed": FusedModel(model, Gradients(), torch.float32, activation_checkpointing=True, pace=pace),
        "plain": PlainModel(model, share_prompts=False, pace=pace),
    }
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found, gradient = _step(model, ways[way], batch, 100)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    expected, exact = _step(model, PlainModel(model, share_prompts=False), batch, 10_000)
    for token, pair in found.items():
        assert pair == pytest.approx(expected[token], abs=1e-4)
    for name, value in gradient.items():
        assert float((value - exact[name]).abs().max()) <= 1e-4 * float(exact[name].abs().max()), name


def test_layers_are_told_there_and_back_each_with_its_amount_of_work(
    tiny_model: ModelOf, random_groups: RandomGroups
) -> None:
    told: list[tuple[str, int]] = []

    class Told(Pace):
        def piece(self, size: int, kind: str = "there") -> None:
            told.append((kind, size))

    model = tiny_model("llama")
    way = FusedModel(model, Gradients(), torch.float32, pace=Told(Team(ThreadCount(1))))
    [micro] = pack(prepare_batch(random_groups(3, num_groups=2), train_step=1), max_tokens=10_000, one_row=True)
    way.logprobs(micro).logprobs.sum().backward()
    layers, cells = model.config.num_hidden_layers, micro.input_ids.size
    assert told == [("there", cells)] * layers + [("back", cells)] * layers


def test_prompts_that_begin_alike_have_the_gradient_of_each_alone(
    tiny_model: ModelOf, group_of: Callable[..., Group]
) -> None:
    model = _randomize(tiny_model("llama"))
    told = list(range(10, 30))
    groups = [group_of(f"g{index}", prompt=[*told, *range(30, 31 + index), 3]) for index in range(4)]
    batch = prepare_batch(groups, train_step=1)
    expected, gradient = _step(model, PlainModel(model, share_prompts=False), batch, 10_000)
    fused = FusedModel(model, Gradients(), torch.float32)
    [micro] = pack(batch, max_tokens=10_000, one_row=fused.one_row)
    assert micro.num_used < len(told) + 4 * (len(told) // 2)
    found, shared = _step(model, fused, batch, 10_000)
    for token, pair in found.items():
        assert pair == pytest.approx(expected[token], abs=1e-5)
    for name, value in shared.items():
        largest = float(gradient[name].abs().max())
        assert float((value - gradient[name]).abs().max()) <= 1e-5 * largest, name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_fused_bfloat16_has_nearly_the_gradient_of_float32(
    tiny_model: ModelOf, random_groups: RandomGroups, kind: str
) -> None:
    model = _randomize(tiny_model(kind))
    batch = _long_and_short(random_groups)
    _, exact = _step(model, FusedModel(model, Gradients(), torch.float32), batch, 300)
    _, rounded = _step(model, FusedModel(model, Gradients(), torch.bfloat16), batch, 300)
    for name, gradient in exact.items():
        assert torch.cosine_similarity(gradient.flatten(), rounded[name].flatten(), dim=0) > 0.99, name


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_in_bfloat16_the_weights_are_rounded_as_an_engine_rounds_them(
    tiny_model: ModelOf, random_groups: RandomGroups, fused: bool, checkpointing: bool
) -> None:
    batch = _long_and_short(random_groups)

    def step(model: Any) -> tuple[Any, Any]:
        if checkpointing and not fused:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        way: LogprobModel = PlainModel(model, torch.bfloat16, share_prompts=True)
        if fused:
            way = FusedModel(model, Gradients(), torch.bfloat16, activation_checkpointing=checkpointing)
        return _step(model, way, batch, 300)

    found, gradient = step(tiny_model("llama", tied=False))
    served = tiny_model("llama", tied=False)
    with torch.no_grad():
        for name, module in served.named_modules():
            # The plain way keeps the head as it is.
            if isinstance(module, torch.nn.Linear) and (fused or name != "lm_head"):
                module.weight.copy_(rounded(module.weight).float())
    expected, exact = step(served)
    assert found == expected
    assert all(torch.equal(gradient[name], exact[name]) for name in exact)


def test_gradients_lie_in_the_same_memory_in_every_step(tiny_model: ModelOf, random_groups: RandomGroups) -> None:
    model = tiny_model("llama")
    batch = prepare_batch(random_groups(3, num_groups=4), train_step=1)
    gradients = Gradients()
    way = FusedModel(model, gradients, torch.float32)
    _, first = _step(model, way, batch, 40)
    places = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
    gradients.clear(model.parameters())
    assert all(p.grad is None for p in model.parameters())
    _, second = _step(model, way, batch, 40)
    assert {name: p.grad.data_ptr() for name, p in model.named_parameters()} == places
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_the_fused_passes_do_not_know_goes_through_transformers() -> None:
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    windowed = MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4, pad_token_id=0))
    gelu = LlamaForCausalLM(LlamaConfig(**SMALL, hidden_act="gelu"))
    assert not any(can_fuse(model) for model in (gpt, windowed, gelu))
