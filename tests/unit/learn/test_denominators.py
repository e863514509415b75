"""One batch cut in every way gives the same gradient: the bug class of this field is denominators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.learn import (
    CISPOLossConfig,
    CorrectionConfig,
    CustomLossConfig,
    DPPOLossConfig,
    GSPOLossConfig,
    KLConfig,
    LoRAConfig,
    PGLossConfig,
    PPOLossConfig,
    TrainWorkerConfig,
)
from penstock.learn.batch import TrainAnswer, TrainBatch, prepare_batch
from penstock.learn.losses import LossTerms, LossTokens
from penstock.learn.losses.ppo import ppo
from penstock.rollout import Group

CUTS: list[dict[str, Any]] = [
    {"max_tokens_per_micro_batch": 100_000},  # 1 x n
    {"max_tokens_per_micro_batch": 1},  # n x 1
    {"max_tokens_per_micro_batch": 37},  # unevenly
    {"max_tokens_per_micro_batch": 37, "share_prompts": False},
    {"max_tokens_per_micro_batch": 60, "fused": False},
    {"max_tokens_per_micro_batch": 60, "fused": False, "share_prompts": False},
    {"max_tokens_per_micro_batch": 37, "activation_checkpointing": True},
]
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {"loss": PPOLossConfig(entropy_coef=0.01)},
    "ppo-sequence": {"loss": PPOLossConfig(aggregation="sequence-mean"), "kl": KLConfig(coef=0.1)},
    "ppo-constant": {
        "loss": PPOLossConfig(aggregation="constant", constant_length=9),
        "correction": CorrectionConfig(
            bypass_mode=False, rollout_is="sequence", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.3_3.0"
        ),
    },
    "gspo": {"loss": GSPOLossConfig(clip_low=0.1, clip_high=0.2)},
    "cispo": {"loss": CISPOLossConfig(), "correction": CorrectionConfig(off_policy_mask_threshold=0.1)},
    "dppo": {"loss": DPPOLossConfig()},
    "pg": {"loss": PGLossConfig(), "correction": "tis"},
}


@pytest.fixture(scope="module")
def batch(random_trees: Callable[..., list[Group]], model_dir: Path) -> TrainBatch:
    """Off-policy rollouts of one to five segments with text of tools; a group of which nothing is trained, and an
    answer of another."""
    groups = random_trees(7, num_groups=4, k=2)
    batch = prepare_batch(groups, train_step=3)
    scored = asyncio.run(TrainWorkerConfig().build(model_dir, total_steps=1, threads=1).score(batch))
    rng = np.random.default_rng(1)

    def moved(answer: Any, masked: bool) -> Any:
        segments = [
            replace(
                segment,
                logprobs=(computed + 0.4 * rng.normal(size=len(segment))).astype(np.float32),
                mask=np.zeros_like(segment.mask) if masked else segment.mask,
            )
            for segment, computed in zip(answer.segments, scored[answer.rollout_id], strict=True)
        ]
        return replace(answer, segments=segments)

    return replace(
        batch,
        groups=[
            replace(g, answers=[moved(a, i == 1 or (i, j) == (2, 0)) for j, a in enumerate(g.answers)])
            for i, g in enumerate(batch.groups)
        ],
    )


def gradient(model_dir: Path, batch: TrainBatch, **fields: Any) -> torch.Tensor:
    config = TrainWorkerConfig(lr=1e-3, max_grad_norm=1e9, betas=(0.0, 0.9), **fields)
    worker = config.build(model_dir, total_steps=10, threads=1)
    if config.lora is not None:
        with torch.no_grad():
            for index, parameter in enumerate(p for p in worker.model.parameters() if p.requires_grad):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    asyncio.run(worker.train(batch))
    state = worker._learner._optimizer_state()
    return torch.cat([value.flatten() for key, value in sorted(state.items()) if key.startswith("exp_avg.")])


IN_EVERY_RUN = ("gspo", "ppo-constant")


@pytest.mark.parametrize(
    "objective",
    [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.long_tier) for name in sorted(OBJECTIVES)],
)
def test_however_a_batch_is_cut_its_gradient_is_the_same(model_dir: Path, batch: TrainBatch, objective: str) -> None:
    found = [gradient(model_dir, batch, **OBJECTIVES[objective], **cut) for cut in CUTS]
    assert found[0].norm() > 1e-3
    for cut, other in zip(CUTS[1:], found[1:], strict=True):
        assert (other - found[0]).abs().max() < 1e-6 * max(1.0, float(found[0].norm())), cut


@pytest.mark.parametrize("objective", ["ppo", pytest.param("gspo", marks=pytest.mark.long_tier)])
def test_an_adapter_too(model_dir: Path, batch: TrainBatch, objective: str) -> None:
    lora = LoRAConfig(rank=4)
    found = [gradient(model_dir, batch, lora=lora, **OBJECTIVES[objective], **cut) for cut in CUTS]
    assert found[0].norm() > 1e-3
    for cut, other in zip(CUTS[1:], found[1:], strict=True):
        assert (other - found[0]).abs().max() < 1e-6 * max(1.0, float(found[0].norm())), cut


def test_the_gradient_is_that_of_each_answer_by_itself(model_dir: Path, batch: TrainBatch) -> None:
    """Sums over answers trained alone, each with the denominator of the whole."""
    loss = PPOLossConfig(aggregation="constant", constant_length=9)
    whole = gradient(model_dir, batch, loss=loss)
    answers = [(g, a) for g in batch.groups for a in g.answers if a.num_trained]
    parts = [gradient(model_dir, replace(batch, groups=[replace(g, answers=[a])]), loss=loss) for g, a in answers]
    count = sum(len(g.answers) for g in batch.groups)
    torch.testing.assert_close(sum(parts) / count, whole, rtol=1e-4, atol=1e-6)


def ppo_by_its_path(tokens: LossTokens, _: CustomLossConfig) -> LossTerms:
    """Whose gradient nobody knows before it is computed."""
    return ppo(tokens, PPOLossConfig())


@pytest.mark.parametrize("fields", [{}, {"lora": LoRAConfig(rank=4)}, {"fused": False}], ids=str)
def test_groups_without_an_advantage_are_gone_through_for_their_logprobs_alone(
    model_dir: Path, batch: TrainBatch, fields: dict[str, Any]
) -> None:
    """What they cost is half or less, and the gradient is that of the whole."""

    def silent(answer: TrainAnswer) -> TrainAnswer:
        zeros = [replace(segment, advantages=np.zeros_like(segment.advantages)) for segment in answer.segments]
        return replace(answer, segments=zeros)

    first, *others = batch.groups
    equal = replace(batch, groups=[replace(first, answers=[silent(answer) for answer in first.answers]), *others])
    by_path = CustomLossConfig(function=f"{__name__}:ppo_by_its_path")
    expected = gradient(model_dir, equal, loss=by_path, **fields)
    torch.testing.assert_close(gradient(model_dir, equal, **fields), expected, rtol=1e-4, atol=1e-7)
    worker, other = (
        TrainWorkerConfig(loss=loss, **fields).build(model_dir, total_steps=1, threads=1)
        for loss in (PPOLossConfig(), by_path)
    )
    outcome, computed = asyncio.run(worker.train(equal)), asyncio.run(other.train(equal))
    # One more: they do not share a pass with those that learn.
    assert outcome.metrics["micro_batches"] == computed.metrics["micro_batches"] + 1
    for name in ("loss", "tokens", "mismatch/kl", "entropy"):
        assert outcome.metrics[name] == pytest.approx(computed.metrics[name], rel=1e-5), name
    for answer in first.answers:
        for found, same in zip(outcome.logprobs[answer.rollout_id], computed.logprobs[answer.rollout_id], strict=True):
            np.testing.assert_allclose(found, same, atol=1e-5)


def test_a_batch_without_any_advantage_is_still_a_step_of_the_optimiser(model_dir: Path, batch: TrainBatch) -> None:
    """Its momentum goes on, whatever the loss."""
    silent = [
        replace(
            group,
            answers=[
                replace(
                    answer,
                    segments=[
                        replace(segment, advantages=np.zeros_like(segment.ids, np.float32))
                        for segment in answer.segments
                    ],
                )
                for answer in group.answers
            ],
        )
        for group in batch.groups
    ]
    assert not gradient(model_dir, replace(batch, groups=silent)).any()


def test_a_rejected_token_counts_nothing_and_stays_in_the_denominator(model_dir: Path, batch: TrainBatch) -> None:
    """So a gradient does not grow because others were rejected."""
    everything = gradient(model_dir, batch, loss=PGLossConfig(), correction=CorrectionConfig(bypass_mode=False))
    rejecting = CorrectionConfig(bypass_mode=False, rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    kept = gradient(model_dir, batch, loss=PGLossConfig(), correction=rejecting)
    outside = CorrectionConfig(bypass_mode=False, rollout_rs="token_k1", rollout_rs_threshold="2.0_1000000000.0")
    below = CorrectionConfig(bypass_mode=False, rollout_rs="token_k1", rollout_rs_threshold="0.0_0.5")
    others = [gradient(model_dir, batch, loss=PGLossConfig(), correction=c) for c in (outside, below)]
    torch.testing.assert_close(kept + others[0] + others[1], everything, rtol=1e-4, atol=1e-6)


def test_several_epochs_are_several_updates_on_the_same_groups(model_dir: Path, batch: TrainBatch) -> None:
    def steps(**fields: Any) -> float:
        worker = TrainWorkerConfig(lr=1e-3, **fields).build(model_dir, total_steps=10, threads=1)
        asyncio.run(worker.train(batch))
        state = worker._learner._optimizer_state()
        return float(next(value for key, value in state.items() if key.startswith("step.")))

    assert steps() == 1
    # One of the four groups has nothing to train.
    assert steps(updates_per_batch=4) == 3
    assert steps(updates_per_batch=4, epochs_per_batch=2) == 6


@pytest.mark.parametrize(("updates", "epochs"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_decoupled_updates_take_their_ratio_against_the_weights_before_the_step(
    model_dir: Path, batch: TrainBatch, updates: int, epochs: int
) -> None:
    config = TrainWorkerConfig(
        lr=1e-2, loss=PPOLossConfig(), correction="decoupled", updates_per_batch=updates, epochs_per_batch=epochs
    )
    worker = config.build(model_dir, total_steps=10, threads=1)
    before = asyncio.run(worker.score(batch))
    outcome = asyncio.run(worker.train(batch))
    assert ("seconds/proximal" in outcome.metrics) == (updates * epochs > 1)
    if updates * epochs == 1:
        assert "ratio/max" not in outcome.metrics
    else:
        assert outcome.metrics["ratio/min"] < 1 < outcome.metrics["ratio/max"]
    # What is reported of the engine is against the trainer before the step, in every update.
    first = np.concatenate([s for rollout in before.values() for s in rollout])
    recorded, mask = (np.concatenate([getattr(s, c) for s in batch.segments]) for c in ("logprobs", "mask"))
    if updates == 1:
        expected = np.abs(first - recorded)[mask == 1].max()
        assert outcome.metrics["mismatch/max_abs"] == pytest.approx(expected, rel=1e-4)
