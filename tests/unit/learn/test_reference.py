"""The reference model, and a KL against it in the loss and in the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.errors import ModelError, RunError
from penstock.learn import KLConfig, LoRAConfig, TrainWorkerConfig
from penstock.learn.batch import BatchSettings, TrainBatch, bare_batch, prepare_batch
from penstock.learn.worker import TorchTrainWorker
from penstock.rollout import Group, Tokens

WAYS: list[dict[str, Any]] = [
    {},
    {"fused": False},
    {"dtype": "bfloat16"},
    {"lora": LoRAConfig(rank=4)},
    {"lora": LoRAConfig(rank=4), "fused": False},
    {"lora": LoRAConfig(rank=4), "dtype": "bfloat16"},
]


@pytest.fixture
def groups(random_groups: Callable[..., list[Group]]) -> list[Group]:
    return random_groups(7, num_groups=4)


@pytest.fixture
def batch(groups: list[Group]) -> TrainBatch:
    return prepare_batch(groups, train_step=1)


def build(model_dir: Path, kl: KLConfig | None, **fields: Any) -> TorchTrainWorker:
    return TrainWorkerConfig(**{"lr": 1e-2, "kl": kl, **fields}).build(model_dir, total_steps=10, threads=1)


def flat(found: dict[str, list[Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate([segment for rollout in found.values() for segment in rollout])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_reference_is_the_model_before_training_and_stays_it(
    model_dir: Path, batch: TrainBatch, way: dict[str, Any]
) -> None:
    worker = build(model_dir, KLConfig(coef=0.1), **way)
    first = flat(asyncio.run(worker.score(batch)))
    metrics = asyncio.run(worker.train(batch)).metrics
    # To the bit: what is computed in bfloat16 is rounded alike on both sides.
    assert metrics["reference_kl"] == 0.0
    assert asyncio.run(worker.train(batch)).metrics["reference_kl"] > 1e-4
    assert np.array_equal(flat(asyncio.run(worker.score_reference(batch))), first)
    assert np.abs(flat(asyncio.run(worker.score(batch))) - first).max() > 1e-2


def test_a_strong_penalty_keeps_the_policy_near_the_reference(model_dir: Path, batch: TrainBatch) -> None:
    free, held = (build(model_dir, KLConfig(coef=coef)) for coef in (1e-6, 10.0))
    found = []
    for worker in (free, held):
        for _ in range(6):
            metrics = asyncio.run(worker.train(batch)).metrics
        found.append(metrics["reference_kl"])
    assert found[1] < found[0] / 3


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_the_gradient_of_a_kl_in_the_loss_is_that_of_a_plain_loop(
    model_dir: Path, batch: TrainBatch, estimator: Any, tmp_path: Path
) -> None:
    other = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    other.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    kl = KLConfig(coef=0.5, estimator=estimator, reference=str(tmp_path))
    metrics = asyncio.run(build(model_dir, kl).train(batch)).metrics
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total = sum(answer.num_trained for answer in batch.answers)
    loss = torch.zeros(())
    for group in batch.groups:
        for answer in group.answers:
            [segment] = answer.segments
            ids = torch.tensor([*group.prompt_ids.tolist(), *segment.ids.tolist()])
            logprobs, reference = (
                m(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[-len(segment) :, 0]
                for m in (model, other)
            )
            d = logprobs - reference.detach()
            through = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d, "k3+": d**2 / 2}[estimator]
            advantages = torch.from_numpy(segment.advantages)
            loss = loss + ((-advantages * logprobs + 0.5 * through).sum()) / total
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_a_reference_of_another_vocabulary_is_refused(
    model_dir: Path, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    model.resize_token_embeddings(50)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="has 50 tokens, the trained model 97"):
        build(model_dir, KLConfig(coef=0.1, reference=str(tmp_path)))


def test_without_a_kl_there_is_no_reference(model_dir: Path, batch: TrainBatch) -> None:
    with pytest.raises(RunError, match=r"train\.kl is not set"):
        asyncio.run(build(model_dir, None).score_reference(batch))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_in_the_reward_is_taken_from_the_score_over_the_trained_tokens(
    groups: list[Group], estimator: Any
) -> None:
    groups[0][0].response = Tokens().append([5, 6], [-1.0, -1.5], model_step=0).append([7], trained=False)
    rng = np.random.default_rng(3)
    reference = {
        rollout.rollout_id: [rng.normal(-2, 0.5, len(s.tokens)).astype(np.float32) for s in rollout.segments]
        for group in groups
        for rollout in group
    }
    settings = BatchSettings(advantage="dr_grpo", kl=KLConfig(coef=0.3, estimator=estimator, place="reward"))
    batch = prepare_batch(groups, train_step=1, settings=settings, reference=reference)
    for group, trained in zip(groups, batch.groups, strict=True):
        shaped = []
        for rollout in group:
            d = rollout.logprobs.astype(np.float64) - reference[rollout.rollout_id][0]
            kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator]
            assert rollout.reward is not None
            shaped.append(rollout.reward.score - 0.3 * kl[rollout.response_mask == 1].sum())
        found = [answer.advantage for answer in trained.answers]
        np.testing.assert_allclose(found, np.asarray(shaped) - np.mean(shaped), atol=1e-6)
    assert batch.metrics["reward/shaped_mean"] != batch.metrics["reward/mean"]


def test_a_kl_in_the_reward_without_a_reference_is_an_error(groups: list[Group]) -> None:
    settings = BatchSettings(kl=KLConfig(coef=0.3, place="reward"))
    bare_batch(groups, train_step=1, settings=settings)
    with pytest.raises(RunError, match="needs the reference's logprobs"):
        prepare_batch(groups, train_step=1, settings=settings)
