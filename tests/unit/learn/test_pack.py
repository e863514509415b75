import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.linear import Gradients
from penstock.learn.logprobs import PlainModel, block_mask, flex_mask, sees
from penstock.learn.pack import MicroBatch, pack
from penstock.rollout import Group, Tokens

RandomGroups = Callable[..., list[Group]]
ModelOf = Callable[..., Any]


def _tokens_by_answer(micro_batches: list[MicroBatch]) -> dict[tuple[int, int], tuple[int, float, float]]:
    found: dict[tuple[int, int], tuple[int, float, float]] = {}
    for micro in micro_batches:
        for answer, token, target, advantage, logprob in zip(
            micro.answer_index, micro.token_index, micro.targets, micro.advantages, micro.engine_logprobs, strict=True
        ):
            assert (answer, token) not in found
            found[int(answer), int(token)] = (int(target), float(advantage), float(logprob))
    return found


def _context(micro: MicroBatch, cell: int) -> list[int]:
    """The ids a cell sees, itself included, by position: what its logits are conditioned on."""
    seen = block_mask(torch.from_numpy(micro.blocks), torch.from_numpy(micro.branches), torch.float32)[:, 0] == 0
    row, column = divmod(cell, micro.input_ids.shape[1])
    cells = np.flatnonzero(seen[row, column].numpy())
    order = np.argsort(micro.position_ids[row, cells])
    assert micro.position_ids[row, cells][order].tolist() == list(range(len(cells)))
    return micro.input_ids[row, cells][order].tolist()  # type: ignore[no-any-return]


def _check_every_token(batch: TrainBatch, micro_batches: list[MicroBatch]) -> None:
    """Each trained token once, with its own advantage, predicted from its prompt and the answer before it."""
    found = _tokens_by_answer(micro_batches)
    expected = {
        (index, int(token)): (int(a.ids[token]), float(a.advantages[token]), float(a.logprobs[token]))
        for index, a in enumerate(batch.answers)
        for token in np.flatnonzero(a.mask)
    }
    assert found == expected
    prompts = [group.prompt_ids.tolist() for group in batch.groups for _ in group.answers]
    for micro in micro_batches:
        for cell, answer, token in zip(micro.predicting, micro.answer_index, micro.token_index, strict=True):
            before = batch.answers[answer].ids[:token].tolist()
            assert _context(micro, int(cell)) == prompts[answer] + before


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("one_row", [True, False])
def test_each_token_of_100_short_answers_keeps_its_advantage(
    random_groups: RandomGroups, share_prompts: bool, one_row: bool
) -> None:
    batch = prepare_batch(random_groups(1, num_groups=25, k=4), train_step=1)
    assert len({float(a.advantages[0]) for a in batch.answers}) == 100
    _check_every_token(batch, pack(batch, max_tokens=64, share_prompts=share_prompts, one_row=one_row))


def _with_holes(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
    """Three in ten tokens of all groups but the first are not trained, as tool text or stale tokens are."""
    groups = [
        replace(g, answers=[replace(a, mask=(rng.random(len(a.ids)) < 0.7).astype(np.uint8)) for a in g.answers])
        for g in batch.groups[1:]
    ]
    return replace(batch, groups=[batch.groups[0], *groups])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), max_tokens=st.integers(1, 120), share_prompts=st.booleans(), one_row=st.booleans())
def test_any_batch_is_packed_whole_within_the_budget(
    random_groups: RandomGroups, seed: int, max_tokens: int, share_prompts: bool, one_row: bool
) -> None:
    batch = prepare_batch(random_groups(seed, num_groups=4, k=3), train_step=1)
    batch = _with_holes(batch, np.random.default_rng(seed))
    micro_batches = pack(batch, max_tokens=max_tokens, share_prompts=share_prompts, one_row=one_row)
    _check_every_token(batch, micro_batches)
    for micro in micro_batches:
        assert not one_row or micro.num_cells == micro.num_used
        one_answer = len(set(micro.answer_index.tolist())) == 1
        assert micro.num_cells <= max_tokens or one_answer


def test_a_group_above_the_budget_is_split_with_its_prompt_again(random_groups: RandomGroups) -> None:
    [group] = random_groups(2, num_groups=1, k=8)
    batch = prepare_batch([group], train_step=1)
    micro_batches = pack(batch, max_tokens=25)
    assert len(micro_batches) > 1
    assert all(np.isin(batch.groups[0].prompt_ids, micro.input_ids).all() for micro in micro_batches)
    _check_every_token(batch, micro_batches)


def test_flex_attention_is_told_the_same_as_any_other(random_groups: RandomGroups) -> None:
    batch = prepare_batch(random_groups(3, num_groups=5), train_step=1)
    for micro in pack(batch, max_tokens=60):
        blocks, branches = torch.from_numpy(micro.blocks), torch.from_numpy(micro.branches)
        rows, length = blocks.shape
        dense = create_mask(sees(blocks, branches), rows, 1, length, length, device="cpu")
        block, branch = micro.blocks.tolist(), micro.branches.tolist()
        for row, query, key in itertools.product(range(rows), range(length), range(length)):
            same_branch = branch[row][key] in (0, branch[row][query])
            visible = key <= query and block[row][query] == block[row][key] and same_branch
            assert bool(dense[row, 0, query, key]) == visible
        assert flex_mask(blocks, branches).shape == (rows, 1, length, length)


def test_the_last_token_of_an_answer_is_not_computed(group_of: Callable[..., Group]) -> None:
    batch = prepare_batch([group_of(prompt=[3, 4], answers=[[5, 6, 7], [8]])], train_step=1)
    [micro] = pack(batch, max_tokens=100)
    assert micro.input_ids.tolist() == [[3, 4, 5, 6]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3]]
    assert micro.predicting.tolist() == [1, 2, 3, 1]
    assert micro.targets.tolist() == [5, 6, 7, 8]


def _gradients(model: Any, batch: TrainBatch, **how: Any) -> tuple[dict[tuple[int, int], float], dict[str, Any]]:
    """Logprob of every trained token, and the gradient of their advantage-weighted mean over the batch."""
    # The models are in float64, but their norms compute in float32: hence the tolerances below.
    model.zero_grad()
    logprobs: dict[tuple[int, int], float] = {}
    total = sum(answer.num_trained for answer in batch.answers)
    way = PlainModel(model, Gradients(), share_prompts=how.get("share_prompts", True))
    for micro in pack(batch, **how):
        computed = way.logprobs(micro, batch.temperature).logprobs
        (computed * torch.from_numpy(micro.advantages).to(computed) / total).sum().backward()
        for answer, token, value in zip(micro.answer_index, micro.token_index, computed.tolist(), strict=True):
            logprobs[int(answer), int(token)] = value
    return logprobs, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_sharing_prompts_changes_neither_logprobs_nor_gradient(
    tiny_model: ModelOf, random_groups: RandomGroups, kind: str, tied: bool
) -> None:
    model = tiny_model(kind, tied=tied).double()
    batch = prepare_batch(random_groups(3, num_groups=5), train_step=1, temperature=0.7)
    shared, shared_gradient = _gradients(model, batch, max_tokens=200)
    unshared, unshared_gradient = _gradients(model, batch, max_tokens=200, share_prompts=False)
    assert shared == pytest.approx(unshared, abs=1e-10)
    for name, gradient in shared_gradient.items():
        torch.testing.assert_close(gradient, unshared_gradient[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_logprobs_are_those_of_the_whole_model(tiny_model: ModelOf, random_groups: RandomGroups, kind: str) -> None:
    model = tiny_model(kind)
    batch = prepare_batch(random_groups(4, num_groups=3), train_step=1, temperature=1.3)
    with torch.no_grad():
        logprobs, index = {}, 0
        for group in batch.groups:
            for answer in group.answers:
                ids = torch.tensor([*group.prompt_ids.tolist(), *answer.ids.tolist()])
                table = (model(input_ids=ids[None]).logits[0] / 1.3).log_softmax(-1)
                start = len(group.prompt_ids)
                for token in range(len(answer.ids)):
                    logprobs[index, token] = table[start + token - 1, ids[start + token]].item()
                index += 1
    assert _gradients(model, batch, max_tokens=500)[0] == pytest.approx(logprobs, abs=1e-5)


def test_micro_batches_add_up_to_the_gradient_of_one_batch(tiny_model: ModelOf, random_groups: RandomGroups) -> None:
    model = tiny_model("llama").double()
    batch = prepare_batch(random_groups(5, num_groups=6), train_step=1)
    whole, whole_gradient = _gradients(model, batch, max_tokens=10_000)
    parts, parts_gradient = _gradients(model, batch, max_tokens=20)
    assert len(pack(batch, max_tokens=20)) > 5 > len(pack(batch, max_tokens=10_000)) == 1
    assert parts == pytest.approx(whole, abs=1e-10)
    for name, gradient in whole_gradient.items():
        torch.testing.assert_close(parts_gradient[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_head_in_chunks_has_the_gradient_of_one_block(
    tiny_model: ModelOf, random_groups: RandomGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama").double()
    batch = prepare_batch(random_groups(6, num_groups=4), train_step=1, temperature=0.9)
    one, one_gradient = _gradients(model, batch, max_tokens=500)
    monkeypatch.setattr("penstock.learn.head.KEPT_BYTES", 5 * 97 * 8)
    monkeypatch.setattr("penstock.learn.head.CHUNK_BYTES", 2 * 97 * 8)
    chunked, chunked_gradient = _gradients(model, batch, max_tokens=500)
    assert chunked == pytest.approx(one, abs=1e-12)
    for name, gradient in one_gradient.items():
        torch.testing.assert_close(chunked_gradient[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_entropy_is_that_of_the_distribution(tiny_model: ModelOf, group_of: Callable[..., Group]) -> None:
    model = tiny_model("llama")
    batch = prepare_batch([group_of(prompt=[3, 4], answers=[[5], [6]])], train_step=1, temperature=2.0)
    [micro] = pack(batch, max_tokens=10)
    with torch.no_grad():
        entropy = PlainModel(model, Gradients(), share_prompts=True).logprobs(micro, 2.0).entropy
        table = (model(input_ids=torch.tensor([[3, 4]])).logits[0, -1] / 2.0).log_softmax(-1)
    expected = -(table.exp() * table).sum().item()
    assert entropy.tolist() == pytest.approx([expected, expected], rel=1e-5)


def test_an_answer_without_a_trained_token_is_left_out(group_of: Callable[..., Group]) -> None:
    group = group_of(answers=[[5, 6], [7]])
    group[1].response = Tokens().append([7], trained=False)
    [micro] = pack(prepare_batch([group], train_step=1), max_tokens=100)
    assert micro.answer_index.tolist() == [0, 0]
