from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from penstock.learn.batch import BatchSettings, TrainBatch, TrainSegment, prepare_batch
from penstock.learn.logprobs import PlainModel, dense_mask, flex_mask, sees
from penstock.learn.pack import MicroBatch, pack
from penstock.rollout import ROOT, Group, Segment, Tokens

RandomGroups = Callable[..., list[Group]]
ModelOf = Callable[..., Any]


def _context(micro: MicroBatch, cell: int) -> list[int]:
    """The ids a cell sees, itself included, by position: what its logits are conditioned on."""
    seen = dense_mask(torch.from_numpy(micro.ends), torch.float32)[:, 0] == 0
    row, column = divmod(cell, micro.input_ids.shape[1])
    cells = np.flatnonzero(seen[row, column].numpy())
    order = np.argsort(micro.position_ids[row, cells])
    assert micro.position_ids[row, cells][order].tolist() == list(range(len(cells)))
    return micro.input_ids[row, cells][order].tolist()  # type: ignore[no-any-return]


def _unshared(batch: TrainBatch) -> Iterator[tuple[int, list[int], TrainSegment]]:
    """The naive layout: of every segment its answer, everything before it, and itself."""
    prompts = [group.prompt_ids for group in batch.groups for _ in group.answers]
    for index, (prompt, answer) in enumerate(zip(prompts, batch.answers, strict=True)):
        contexts: list[list[int]] = []
        for segment in answer.segments:
            if segment.parent == ROOT:
                contexts.append(prompt[: segment.start].tolist())
            else:
                before = answer.segments[segment.parent].ids[: segment.start].tolist()
                contexts.append([*contexts[segment.parent], *before])
            yield index, contexts[-1], segment


def _check_every_token(batch: TrainBatch, micro_batches: list[MicroBatch], *, every_token: bool = False) -> None:
    """Each trained token once, with its own advantage, predicted from everything before it and nothing else."""
    expected = {}
    first = 0
    for answer, context, segment in _unshared(batch):
        for token in range(len(segment)):
            if (every_token or segment.mask[token]) and (context or token):
                numbers = (int(segment.ids[token]), float(segment.advantages[token]), float(segment.logprobs[token]))
                expected[first + token] = (answer, [*context, *segment.ids[:token].tolist()], *numbers)
        first += len(segment)
    found = {}
    for micro in micro_batches:
        assert micro.lengths.max() == micro.ends.shape[1]
        columns = (micro.token_index, micro.answer_index, micro.predicting, micro.targets)
        for token, answer, cell, target, advantage, logprob in zip(
            *columns, micro.advantages, micro.engine_logprobs, strict=True
        ):
            assert int(token) not in found
            context = _context(micro, int(cell))
            found[int(token)] = (int(answer), context, int(target), float(advantage), float(logprob))
    assert found == expected


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("one_row", [True, False])
def test_each_token_of_100_short_answers_keeps_its_advantage(
    random_groups: RandomGroups, share_prompts: bool, one_row: bool
) -> None:
    batch = prepare_batch(random_groups(1, num_groups=25, k=4), train_step=1)
    assert len({answer.advantage for answer in batch.answers}) == 100
    _check_every_token(batch, pack(batch, max_tokens=64, share_prompts=share_prompts, one_row=one_row))


def _with_holes(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
    """Three in ten tokens of all groups but the first are not trained, as tool text or stale tokens are."""

    def holed(segment: TrainSegment) -> TrainSegment:
        return replace(segment, mask=segment.mask * (rng.random(len(segment)) < 0.7).astype(np.uint8))

    groups = [
        replace(g, answers=[replace(a, segments=[holed(s) for s in a.segments]) for a in g.answers])
        for g in batch.groups[1:]
    ]
    return replace(batch, groups=[batch.groups[0], *groups])


@settings(max_examples=40)
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
        assert micro.num_cells <= max_tokens or len(_segments_of(batch, micro)) == 1


def _segments_of(batch: TrainBatch, micro: MicroBatch) -> set[int]:
    ends = np.cumsum([len(segment) for segment in batch.segments])
    return set(np.searchsorted(ends, micro.token_index, side="right").tolist())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    max_tokens=st.integers(1, 200),
    share_prompts=st.booleans(),
    one_row=st.booleans(),
    every_token=st.booleans(),
)
def test_any_tree_of_segments_is_packed_as_if_each_stood_alone(
    random_trees: RandomGroups, seed: int, max_tokens: int, share_prompts: bool, one_row: bool, every_token: bool
) -> None:
    batch = prepare_batch(random_trees(seed, num_groups=3, k=3), train_step=1)
    batch = _with_holes(batch, np.random.default_rng(seed))
    how = {"share_prompts": share_prompts, "one_row": one_row, "every_token": every_token}
    micro_batches = pack(batch, max_tokens=max_tokens, **how)
    _check_every_token(batch, micro_batches, every_token=every_token)
    for micro in micro_batches:
        assert not one_row or micro.num_cells == micro.num_used
        assert micro.num_cells <= max_tokens or len(_segments_of(batch, micro)) == 1


def _told_the_same(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
    """Every prompt begins as some other, for 0 to 30 tokens."""
    instructions = rng.integers(3, 50, 30).astype(np.int32)
    groups = []
    for group in batch.groups:
        told = instructions[: rng.integers(0, 31)]
        answers = [
            replace(answer, segments=[_after(segment, len(told)) for segment in answer.segments])
            for answer in group.answers
        ]
        groups.append(replace(group, prompt_ids=np.concatenate([told, group.prompt_ids]), answers=answers))
    return replace(batch, groups=groups)


def _after(segment: TrainSegment, more: int) -> TrainSegment:
    return replace(segment, start=segment.start + more) if segment.parent == ROOT else segment


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), max_tokens=st.integers(1, 400), share_prompts=st.booleans())
def test_prompts_that_begin_alike_are_packed_as_if_each_stood_alone(
    random_trees: RandomGroups, seed: int, max_tokens: int, share_prompts: bool
) -> None:
    rng = np.random.default_rng(seed)
    batch = _told_the_same(prepare_batch(random_trees(seed, num_groups=5, k=2), train_step=1), rng)
    batch = _with_holes(batch, rng)
    micro_batches = pack(batch, max_tokens=max_tokens, share_prompts=share_prompts, one_row=True)
    _check_every_token(batch, micro_batches)
    for micro in micro_batches:
        assert micro.num_cells <= max_tokens or len(_segments_of(batch, micro)) == 1


def test_what_several_prompts_begin_with_stands_once_in_a_row(group_of: Callable[..., Group]) -> None:
    told = list(range(10, 20))
    prompts = [[*told, 3, 4], [*told, 3, 5, 6], [*told, 7], [8, 9]]
    groups = [group_of(f"g{index}", prompt=prompt) for index, prompt in enumerate(prompts)]
    batch = prepare_batch(groups, train_step=1)
    [micro] = pack(batch, max_tokens=1_000, one_row=True)
    _check_every_token(batch, [micro])
    answers = 4 * (2 + 1)  # of three and two tokens, without their last
    assert micro.num_used == len(told) + len([3, 4]) + len([5, 6]) + len([7]) + len([8, 9]) + answers
    # Under a mask rows are as long as their tree, and are not made longer.
    assert all(len(micro.lengths) == 4 for micro in pack(batch, max_tokens=1_000))


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), max_tokens=st.integers(20, 400))
def test_no_token_of_a_tree_stands_twice_in_a_piece(random_trees: RandomGroups, seed: int, max_tokens: int) -> None:
    batch = prepare_batch(random_trees(seed, num_groups=2, k=3), train_step=1)
    for micro in pack(batch, max_tokens=max_tokens, one_row=True):
        runs = [run.tolist() for run in np.split(micro.input_ids[0], micro.runs[1:])]
        known = [group.prompt_ids.tolist() for group in batch.groups] + [s.ids.tolist() for s in batch.segments]
        assert all(any(run == ids[: len(run)] for ids in known) for run in runs)
        assert len(runs) <= len(known)


def test_segments_stand_after_what_they_go_on_from_and_share_it(branched: Callable[[], list[Group]]) -> None:
    [group] = branched()
    batch = prepare_batch([group], train_step=1)
    [micro] = pack(batch, max_tokens=100)
    # The prompt, the first answer less its last token, then the second: its first segment, what goes on from the
    # whole of it, and from its second token; and last what goes on from two tokens of the prompt.
    assert micro.input_ids.tolist() == [[3, 4, 5, 6, 20, 21, 30, 31, 32, 33, 50, 51, 40, 41, 60]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 6, 7, 2]]
    assert micro.ends.tolist() == [[15, 15, 14, 14, 6, 6, 14, 14, 12, 12, 12, 12, 14, 14, 15]]
    assert micro.runs.tolist() == [0, 4, 6, 10, 12, 14]
    _check_every_token(batch, [micro])


def test_groups_that_ask_the_same_share_the_prompt(group_of: Callable[..., Group]) -> None:
    groups = [group_of(name, prompt=[3, 4, 5], answers=[[6, 7], [8, 9]]) for name in ("one", "other")]
    batch = prepare_batch(groups, train_step=1)
    [micro] = pack(batch, max_tokens=100)
    assert micro.input_ids.tolist() == [[3, 4, 5, 6, 8, 6, 8]]
    _check_every_token(batch, [micro])


def test_a_token_that_nothing_comes_before_is_not_scored(group_of: Callable[..., Group]) -> None:
    group = group_of(answers=[[5, 6], [7]])
    tokens = Tokens().append([9], trained=False).append([10], [-1.0], model_step=0)
    group[1].segments = (*group[1].segments, Segment(tokens, ROOT, 0))
    batch = prepare_batch([group], train_step=1)
    micro_batches = pack(batch, max_tokens=100, every_token=True)
    _check_every_token(batch, micro_batches, every_token=True)
    assert sum(len(micro.targets) for micro in micro_batches) == sum(len(segment) for segment in batch.segments) - 1


def test_a_group_above_the_budget_is_split_with_its_prompt_again(random_groups: RandomGroups) -> None:
    [group] = random_groups(2, num_groups=1, k=8)
    batch = prepare_batch([group], train_step=1)
    micro_batches = pack(batch, max_tokens=25)
    assert len(micro_batches) > 1
    assert all(np.isin(batch.groups[0].prompt_ids, micro.input_ids).all() for micro in micro_batches)
    _check_every_token(batch, micro_batches)


def test_flex_attention_is_told_the_same_as_any_other(random_trees: RandomGroups) -> None:
    batch = prepare_batch(random_trees(3, num_groups=3), train_step=1)
    for micro in pack(batch, max_tokens=120):
        ends = torch.from_numpy(micro.ends)
        rows, length = ends.shape
        told = create_mask(sees(ends), rows, 1, length, length, device="cpu")
        assert torch.equal(told, dense_mask(ends, torch.float32) == 0)
        assert flex_mask(ends).shape == (rows, 1, length, length)


def test_the_last_token_of_an_answer_is_not_computed(group_of: Callable[..., Group]) -> None:
    batch = prepare_batch([group_of(prompt=[3, 4], answers=[[5, 6, 7], [8]])], train_step=1)
    [micro] = pack(batch, max_tokens=100)
    assert micro.input_ids.tolist() == [[3, 4, 5, 6]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3]]
    assert micro.predicting.tolist() == [1, 2, 3, 1]
    assert micro.targets.tolist() == [5, 6, 7, 8]


def _gradients(model: Any, batch: TrainBatch, **how: Any) -> tuple[dict[int, float], dict[str, Any]]:
    """Logprob of every trained token, and the gradient of their advantage-weighted mean over the batch."""
    # The models are in float64, but their norms compute in float32: hence the tolerances below.
    model.zero_grad()
    logprobs: dict[int, float] = {}
    total = sum(answer.num_trained for answer in batch.answers)
    way = PlainModel(model, share_prompts=how.get("share_prompts", True))
    for micro in pack(batch, **how):
        computed = way.logprobs(micro).logprobs
        (computed * torch.from_numpy(micro.advantages).to(computed) / total).sum().backward()
        logprobs |= dict(zip(micro.token_index.tolist(), computed.tolist(), strict=True))
    return logprobs, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_sharing_prompts_changes_neither_logprobs_nor_gradient(
    tiny_model: ModelOf, random_groups: RandomGroups, kind: str, tied: bool
) -> None:
    model = tiny_model(kind, tied=tied).double()
    batch = prepare_batch(random_groups(3, num_groups=5), train_step=1, settings=BatchSettings(temperatures={"": 0.7}))
    shared, shared_gradient = _gradients(model, batch, max_tokens=200)
    unshared, unshared_gradient = _gradients(model, batch, max_tokens=200, share_prompts=False)
    assert shared == pytest.approx(unshared, abs=1e-10)
    for name, gradient in shared_gradient.items():
        torch.testing.assert_close(gradient, unshared_gradient[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_logprobs_are_those_of_the_whole_model(tiny_model: ModelOf, random_trees: RandomGroups, kind: str) -> None:
    model = tiny_model(kind)
    batch = prepare_batch(
        random_trees(4, num_groups=3, tool_share=0.0), train_step=1, settings=BatchSettings(temperatures={"": 1.3})
    )
    logprobs = []
    with torch.no_grad():
        for _, context, segment in _unshared(batch):
            ids = torch.tensor([*context, *segment.ids.tolist()])
            table = (model(input_ids=ids[None]).logits[0] / 1.3).log_softmax(-1)
            logprobs += [table[at - 1, ids[at]].item() for at in range(len(context), len(ids))]
    assert _gradients(model, batch, max_tokens=500)[0] == pytest.approx(dict(enumerate(logprobs)), abs=1e-5)


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
    batch = prepare_batch(random_groups(6, num_groups=4), train_step=1, settings=BatchSettings(temperatures={"": 0.9}))
    one, one_gradient = _gradients(model, batch, max_tokens=500)
    monkeypatch.setattr("penstock.learn.head.KEPT_BYTES", 5 * 97 * 8)
    monkeypatch.setattr("penstock.learn.head.CHUNK_BYTES", 2 * 97 * 8)
    chunked, chunked_gradient = _gradients(model, batch, max_tokens=500)
    assert chunked == pytest.approx(one, abs=1e-12)
    for name, gradient in one_gradient.items():
        torch.testing.assert_close(chunked_gradient[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_entropy_is_that_of_the_distribution(tiny_model: ModelOf, group_of: Callable[..., Group]) -> None:
    model = tiny_model("llama")
    batch = prepare_batch(
        [group_of(prompt=[3, 4], answers=[[5], [6]])], train_step=1, settings=BatchSettings(temperatures={"": 2.0})
    )
    [micro] = pack(batch, max_tokens=10)
    with torch.no_grad():
        entropy = PlainModel(model, share_prompts=True).logprobs(micro).entropy
        table = (model(input_ids=torch.tensor([[3, 4]])).logits[0, -1] / 2.0).log_softmax(-1)
    expected = -(table.exp() * table).sum().item()
    assert entropy.tolist() == pytest.approx([expected, expected], rel=1e-5)


def test_an_answer_without_a_trained_token_is_left_out(group_of: Callable[..., Group]) -> None:
    group = group_of(answers=[[5, 6], [7]])
    group[1].response = Tokens().append([7], trained=False)
    [micro] = pack(prepare_batch([group], train_step=1), max_tokens=100)
    assert micro.answer_index.tolist() == [0, 0]


@pytest.mark.parametrize(
    "way", [{}, {"one_row": True}, {"share_prompts": False}, {"share_prompts": False, "one_row": True}]
)
@pytest.mark.parametrize("max_tokens", [1, 30, 80, 10_000])
def test_answers_that_are_kept_whole_are_in_one_micro_batch_each_and_nothing_is_lost(
    random_trees: RandomGroups, max_tokens: int, way: dict[str, bool]
) -> None:
    batch = prepare_batch(random_trees(5, num_groups=4), train_step=1)
    kept, split = (
        pack(batch, max_tokens=max_tokens, whole_answers=whole, **way)  # type: ignore[arg-type]
        for whole in (True, False)
    )
    of_answer: dict[int, set[int]] = {}
    for number, micro in enumerate(kept):
        for answer in micro.answer_index.tolist():
            of_answer.setdefault(answer, set()).add(number)
    assert all(len(numbers) == 1 for numbers in of_answer.values())
    tokens = [sorted(np.concatenate([m.token_index for m in found]).tolist()) for found in (kept, split)]
    assert tokens[0] == tokens[1]
    if max_tokens == 1:
        assert len(split) > len(kept) == len(of_answer)


def test_segments_of_which_some_lack_a_column_cannot_be_packed(group_of: Callable[..., Group]) -> None:
    batch = prepare_batch([group_of()], train_step=1)
    [group] = batch.groups
    first = replace(group.answers[0].segments[0], reference_logprobs=np.zeros(3, np.float32))
    odd = replace(group, answers=[replace(group.answers[0], segments=[first]), group.answers[1]])
    with pytest.raises(ValueError, match="columns that others lack"):
        pack(replace(batch, groups=[odd]), max_tokens=100)
