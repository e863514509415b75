"""Rollouts of several segments: every sampled token is trained once, and sharing what they have in common costs nothing
in exactness. The yardstick is each segment as a sequence of its own, through transformers, in float64."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.learn.batch import BatchSettings, TrainBatch, prepare_batch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.fused import FusedModel
from penstock.learn.linear import Gradients
from penstock.learn.load import LogprobModel
from penstock.learn.logprobs import PlainModel
from penstock.learn.pack import pack
from penstock.rollout import ROOT, Group, RolloutState, Segment, unpack_ids

ModelOf = Callable[..., Any]
Trees = Callable[..., list[Group]]


def _alone(model: Any, groups: list[Group], batch: TrainBatch) -> dict[str, torch.Tensor]:
    """The gradient of the advantage-weighted logprobs of all sampled tokens, each segment a sequence of its own."""
    model.zero_grad()
    rollouts = [rollout for group in groups for rollout in group]
    for rollout, answer in zip(rollouts, batch.answers, strict=True):
        for index, segment in enumerate(rollout.segments):
            context = unpack_ids(rollout.context_ids(index))
            ids = torch.from_numpy(np.concatenate([context, unpack_ids(segment.tokens.ids)]).astype(np.int64))
            table = (model(input_ids=ids[None]).logits[0] / float(answer.segments[0].temperatures[0])).log_softmax(-1)[
                :-1
            ]
            logprobs = table.gather(1, ids[1:, None])[len(context) - 1 :, 0]
            sampled = torch.from_numpy(np.frombuffer(segment.tokens.mask, np.uint8) == 1)
            (logprobs[sampled] * answer.advantage).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def _through(model: Any, way: LogprobModel, batch: TrainBatch, max_tokens: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    trained: list[int] = []
    for micro in pack(batch, max_tokens=max_tokens, share_prompts=way.share_prompts, one_row=way.one_row):
        logprobs = way.logprobs(micro).logprobs
        (logprobs * torch.from_numpy(micro.advantages)).sum().backward()
        trained += micro.token_index.tolist()
    masks = np.concatenate([segment.mask for segment in batch.segments])
    assert sorted(trained) == np.flatnonzero(masks).tolist()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("max_tokens", [1000, 12])
@pytest.mark.parametrize("way", ["fused", "plain", "fused, unshared", "plain, unshared"])
def test_the_gradient_is_that_of_segments_that_share_nothing(
    tiny_model: ModelOf, branched: Trees, random_trees: Trees, kind: str, max_tokens: int, way: str
) -> None:
    model = tiny_model(kind)
    groups = [*branched(), *random_trees(5, num_groups=2)]
    batch = prepare_batch(groups, train_step=1, settings=BatchSettings(temperatures={"": 0.8}))
    shares = "unshared" not in way
    computes = (
        FusedModel(model, Gradients(), torch.float32, share_prompts=shares)
        if way.startswith("fused")
        else PlainModel(model, share_prompts=shares)
    )
    found = _through(model, computes, batch, max_tokens)
    expected = _alone(tiny_model(kind).double(), groups, batch)
    whole = torch.cat([gradient.flatten() for gradient in expected.values()])
    difference = torch.cat([found[name].double().flatten() for name in expected]) - whole
    assert difference.norm() < 1e-6 * whole.norm()


def _two_segments(branched: Trees, second: Segment) -> list[Group]:
    [group] = branched()
    group[1].segments = (group[1].segments[0], second)
    return [group]


@pytest.mark.parametrize(("parent", "start"), [(0, 4), (0, 2), (ROOT, 4), (ROOT, 2)])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_on_two_segments_is_that_of_two_sequences(
    model_dir: Path, branched: Trees, parent: int, start: int, fused: bool
) -> None:
    """After all of the first, in its middle, beside it, and after a part of the prompt."""
    tokens = branched()[0][1].segments[1].tokens
    batch = prepare_batch(_two_segments(branched, Segment(tokens, parent, start)), train_step=1)
    assert len(set(batch.advantages.values())) == len(batch.answers) == 2
    outcomes = [
        asyncio.run(
            TrainWorkerConfig(lr=1e-3, fused=fused, share_prompts=shares)
            .build(model_dir, total_steps=1, threads=1)
            .train(batch)
        )
        for shares in (True, False)
    ]
    shared, alone = outcomes
    assert shared.metrics["tokens"] == alone.metrics["tokens"] == 3 + 4 + 3
    assert shared.metrics["grad_norm"] == pytest.approx(alone.metrics["grad_norm"], rel=1e-5)
    assert [len(segment) for segment in shared.logprobs["g/1"]] == [4, 3]
    for rollout, segments in shared.logprobs.items():
        for one, other in zip(segments, alone.logprobs[rollout], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_logprobs_are_told_by_rollout_and_segment(model_dir: Path, tiny_model: ModelOf, branched: Trees) -> None:
    groups = branched()
    batch = prepare_batch(groups, train_step=1)
    worker = TrainWorkerConfig().build(model_dir, total_steps=1, threads=1)
    scored, trained = asyncio.run(worker.score(batch)), asyncio.run(worker.train(batch)).logprobs
    rollout: RolloutState = groups[0][1]
    model = tiny_model("llama")
    for index, segment in enumerate(rollout.segments):
        context, ids = unpack_ids(rollout.context_ids(index)), unpack_ids(segment.tokens.ids)
        whole = torch.from_numpy(np.concatenate([context, ids]).astype(np.int64))
        with torch.no_grad():
            table = model(input_ids=whole[None]).logits[0].log_softmax(-1)[:-1]
        expected = table.gather(1, whole[1:, None])[len(context) - 1 :, 0].numpy()
        np.testing.assert_allclose(scored[rollout.rollout_id][index], expected, atol=1e-5)
        np.testing.assert_allclose(trained[rollout.rollout_id][index], expected, atol=1e-5)
