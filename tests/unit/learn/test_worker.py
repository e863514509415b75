"""A train step: what it changes, what it tells, and when it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from penstock.errors import RunError, StepRefused, UserFunctionError
from penstock.learn.batch import BatchSettings, TrainBatch, prepare_batch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.losses import CustomLossConfig, LossTerms, LossTokens, PPOLossConfig
from penstock.learn.overlong import OverlongConfig
from penstock.rollout import FinishReason, Tokens

from .worker_parts import (
    RandomGroups,
    are_same,
    go_on,
    new_worker,
    scores_of,
    state_of,
    train,
    weights_of,
    with_advantage,
)


def exploding_after_the_first_update(tokens: LossTokens, config: CustomLossConfig) -> LossTerms:
    """Finite on the first half of the groups, infinite on the second: told apart by their advantages."""
    late = (tokens.advantages.abs() > 100).any()
    return LossTerms(-tokens.advantages * tokens.logprobs * (torch.inf if late else 1.0))


def with_a_gradient_that_is_not_a_number(tokens: LossTokens, config: CustomLossConfig) -> LossTerms:
    return LossTerms((tokens.logprobs - tokens.logprobs.detach()).sqrt())


def test_training_raises_the_logprob_of_better_answers(model_dir: Path, batch: TrainBatch) -> None:
    worker = new_worker(model_dir)
    before = scores_of(worker, batch)
    for _ in range(5):
        metrics = train(worker, batch)
    after = scores_of(worker, batch)
    gain = [float((b - a).mean()) for a, b in zip(before, after, strict=True)]
    scores = [answer.advantage for answer in batch.answers]
    assert np.corrcoef(gain, scores)[0, 1] > 0.5
    assert metrics["tokens"] == batch.metrics["trained_tokens"]
    assert metrics["lr"] == 1e-3
    assert {"loss", "grad_norm", "entropy", "clip_fraction_low", "clip_fraction_high", "tokens_per_s"} < metrics.keys()
    assert {"mismatch/mean_abs", "mismatch/max_abs", "mismatch/k3_kl", "mismatch/ess"} < metrics.keys()
    assert {"seconds/forward", "seconds/backward", "seconds/optimizer", "seconds/total"} < metrics.keys()


def test_the_mismatch_is_that_of_the_engine_and_the_trainer(
    model_dir: Path, batch: TrainBatch, random_groups: RandomGroups
) -> None:
    worker = new_worker(model_dir)
    scored = np.concatenate(scores_of(worker, batch))
    recorded = np.concatenate([segment.logprobs for segment in batch.segments])
    metrics = train(worker, batch)
    assert metrics["mismatch/mean_abs"] == pytest.approx(np.abs(scored - recorded).mean(), rel=1e-4)
    assert metrics["mismatch/max_abs"] == pytest.approx(np.abs(scored - recorded).max(), rel=1e-4)


def test_micro_batches_and_sharing_change_the_step_by_rounding_only(model_dir: Path, batch: TrainBatch) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"max_tokens_per_micro_batch": 16},
        {"share_prompts": False},
        {"activation_checkpointing": True},
        {"fused": False},
        {"fused": False, "share_prompts": False},
        {"fused": False, "activation_checkpointing": True},
    ]
    for aggregation in ({}, {"aggregation": "sequence-mean"}, {"aggregation": "constant", "constant_length": 9}):
        loss = PPOLossConfig(**aggregation)
        # One step of AdamW is nearly the sign of the gradient; a large eps keeps it linear and comparable.
        results = [train(new_worker(model_dir, loss=loss, eps=1.0, **way), batch) for way in ways]
        for key in ("loss", "grad_norm", "entropy", "mismatch/mean_abs", "mismatch/k3_kl"):
            assert [r[key] for r in results] == pytest.approx([results[0][key]] * len(ways), rel=1e-4, abs=1e-6), key
        assert results[1]["micro_batches"] > 1 == results[0]["micro_batches"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_batch_on_the_same_threads_gives_the_same_bits(
    model_dir: Path, batch: TrainBatch, dtype: Literal["float32", "bfloat16"]
) -> None:
    weights = []
    for _ in range(2):
        worker = TrainWorkerConfig(lr=1e-3, max_tokens_per_micro_batch=40, dtype=dtype).build(
            model_dir, total_steps=10, deterministic=True, threads=2
        )
        for _ in range(3):
            train(worker, batch)
        weights.append(weights_of(worker))
    assert are_same(*weights)
    assert not torch.are_deterministic_algorithms_enabled()


def test_one_step_is_that_of_a_plain_loop_over_the_answers(model_dir: Path, batch: TrainBatch) -> None:
    worker = new_worker(model_dir, max_grad_norm=0.5, weight_decay=0.1)
    metrics = train(worker, batch)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    total = sum(answer.num_trained for answer in batch.answers)
    for group in batch.groups:
        for answer in group.answers:
            [segment] = answer.segments
            ids = torch.tensor([*group.prompt_ids.tolist(), *segment.ids.tolist()])
            table = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1]
            logprobs = table.gather(1, ids[1:, None])[len(group.prompt_ids) - 1 :, 0]
            (-(logprobs * torch.from_numpy(segment.advantages)).sum() / total).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    optimizer.step()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    expected = dict(model.named_parameters())
    for name, tensor in worker.weights.tensors():
        # AdamW's first step is lr times the gradient's sign; a gradient near 0 may turn, so two steps apart at most.
        difference = (tensor - expected[name].detach()).abs()
        assert difference.max() <= 2.1e-3
        assert (difference > 1e-5).float().mean() < 0.01, name


def test_off_policy_steps_clip_against_the_engine_and_on_policy_ones_do_not(
    model_dir: Path, random_groups: RandomGroups
) -> None:
    groups = random_groups(8, num_groups=4)
    on_policy = train(new_worker(model_dir), prepare_batch(groups, train_step=1))
    stale = train(new_worker(model_dir), prepare_batch(groups, train_step=2))
    twice = train(new_worker(model_dir, updates_per_batch=2), prepare_batch(groups, train_step=1))
    assert on_policy["clip_fraction_low"] == on_policy["clip_fraction_high"] == 0
    assert stale["clip_fraction_low"] > 0
    assert twice["clip_fraction_low"] > 0


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_step_that_is_not_finite_changes_nothing(model_dir: Path, batch: TrainBatch, share_prompts: bool) -> None:
    worker, twin = (new_worker(model_dir, share_prompts=share_prompts) for _ in range(2))
    train(worker, batch)
    train(twin, batch)
    weights, state = weights_of(worker), state_of(worker)
    poisoned = with_advantage(batch, float("inf"))
    with pytest.raises(StepRefused, match="train step 1: loss is"):
        train(worker, poisoned)
    assert are_same(weights_of(worker), weights)
    assert are_same(state_of(worker), state)
    assert all(parameter.grad is None for parameter in worker.model.parameters())
    train(worker, batch)
    train(twin, batch)
    assert are_same(weights_of(worker), weights_of(twin))


def test_a_finite_loss_with_a_gradient_that_is_not_is_refused(model_dir: Path, batch: TrainBatch) -> None:
    loss = CustomLossConfig(function=f"{__name__}.with_a_gradient_that_is_not_a_number")
    worker = new_worker(model_dir, loss=loss)
    weights = weights_of(worker)
    with pytest.raises(StepRefused, match=r"loss is 0\.0, gradient norm is nan"):
        train(worker, batch)
    assert are_same(weights_of(worker), weights)
    assert int(state_of(worker)["steps_done"]) == 0


def test_a_refused_second_update_takes_the_first_back(model_dir: Path, batch: TrainBatch) -> None:
    loss = CustomLossConfig(function=f"{__name__}.exploding_after_the_first_update")
    worker = new_worker(model_dir, updates_per_batch=2)
    train(worker, batch)
    exploding = new_worker(model_dir, updates_per_batch=2, loss=loss)
    go_on(worker, exploding)
    weights, state = weights_of(exploding), state_of(exploding)
    half = len(batch.groups) // 2
    late = with_advantage(batch, 1000.0).groups[half:]
    with pytest.raises(StepRefused):
        train(exploding, TrainBatch(2, [*batch.groups[:half], *late]))
    assert are_same(weights_of(exploding), weights)
    assert are_same(state_of(exploding), state)


@pytest.mark.parametrize("fields", [{}, {"updates_per_batch": 2, "correction": "tis"}])
def test_a_batch_of_nothing_but_cut_off_answers_is_a_step_that_changes_no_weight(
    model_dir: Path, random_groups: RandomGroups, fields: dict[str, Any]
) -> None:
    groups = random_groups(7, num_groups=2)
    for rollout in (rollout for group in groups for rollout in group):
        rollout.finish_reason = FinishReason.LENGTH
    settings = BatchSettings(overlong=OverlongConfig(mask_truncated=True))
    batch = prepare_batch(groups, train_step=1, settings=settings)
    worker = new_worker(model_dir, lr=1e-2, weight_decay=0.1, **fields)
    before = {name: tensor.clone() for name, tensor in weights_of(worker).items()}
    metrics = train(worker, batch)
    assert metrics["tokens"] == 0 and "loss" not in metrics
    assert np.isfinite(list(metrics.values())).all()
    assert are_same(before, weights_of(worker))


def test_a_batch_with_fewer_groups_than_updates_is_an_error(model_dir: Path, batch: TrainBatch) -> None:
    with pytest.raises(RunError, match="updates_per_batch is 5, but train step 1 has 4 groups"):
        train(new_worker(model_dir, updates_per_batch=5), batch)


def test_the_schedule_that_is_configured_is_used(model_dir: Path, batch: TrainBatch) -> None:
    worker = new_worker(model_dir, warmup_steps=2, schedule="linear")
    assert [train(worker, batch)["lr"] for _ in range(4)] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3 * 7 / 8])


def test_norms_and_biases_do_not_decay(tiny_model: Callable[..., Any], batch: TrainBatch, tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    worker = new_worker(tmp_path, lr=1e-2, weight_decay=1.0)
    before = weights_of(worker)
    # With no advantage there is no gradient: what changes, decays.
    train(worker, with_advantage(batch, 0.0))
    unchanged = {name for name, tensor in weights_of(worker).items() if torch.equal(tensor, before[name])}
    assert unchanged == {name for name in before if "norm" in name or name.endswith("bias")}


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_in_which_every_group_is_equally_good_follows_the_momentum_without_a_backward_pass(
    model_dir: Path, batch: TrainBatch, fused: bool
) -> None:
    worker = new_worker(model_dir, fused=fused)
    train(worker, batch)
    before, first = weights_of(worker), state_of(worker)
    metrics = train(worker, with_advantage(batch, 0.0))
    assert "seconds/backward" not in metrics and metrics["grad_norm"] == 0.0
    assert not any(torch.equal(tensor, before[name]) for name, tensor in weights_of(worker).items())
    momenta = {name: tensor for name, tensor in state_of(worker).items() if name.startswith("exp_avg.")}
    assert momenta
    for name, momentum in momenta.items():
        torch.testing.assert_close(momentum, 0.9 * first[name])


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_padding_token_is_trained_as_any_other_on_both_paths(
    batch: TrainBatch, tmp_path: Path, share_prompts: bool
) -> None:
    pad = int(batch.groups[0].prompt_ids[0])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=pad, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    rows = []
    for fused in (True, False):
        worker = new_worker(tmp_path, fused=fused, share_prompts=share_prompts, max_grad_norm=1e9)
        train(worker, batch)
        rows.append(state_of(worker)["exp_avg.model.embed_tokens.weight"])
    assert rows[0][pad].abs().max() > 0
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-7)


def test_weights_that_the_optimiser_makes_infinite_end_the_run(
    tiny_model: Callable[..., Any], batch: TrainBatch, tmp_path: Path
) -> None:
    model = tiny_model("llama", tied=False)
    with torch.no_grad():
        # Of a token that is nowhere in the batch, so that the gradient is finite; it decays beyond what float32 holds.
        model.model.embed_tokens.weight[0, 0] = 3e38
    model.save_pretrained(tmp_path)
    worker = new_worker(tmp_path, lr=10.0, weight_decay=1.0)
    with pytest.raises(RunError, match="train step 1: the optimiser made weights that are not finite"):
        train(worker, batch)


def that_answers_in_words(tokens: LossTokens, config: CustomLossConfig) -> object:
    return "low"


def that_adds_up(tokens: LossTokens, config: CustomLossConfig) -> LossTerms:
    return LossTerms(tokens.logprobs.sum())


def that_raises(tokens: LossTokens, config: CustomLossConfig) -> LossTerms:
    raise KeyError("entropy")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("that_answers_in_words", "returned a str; it must return LossTerms"),
        ("that_adds_up", r"\['loss'\] must be tensors of [0-9]+ numbers"),
        ("that_raises", "raised KeyError: 'entropy'"),
    ],
)
def test_a_loss_of_the_users_that_fails_is_named(model_dir: Path, batch: TrainBatch, name: str, problem: str) -> None:
    worker = new_worker(model_dir, loss=CustomLossConfig(function=f"{__name__}.{name}"))
    with pytest.raises(UserFunctionError, match=rf"test_worker\.{name}.*{problem}"):
        train(worker, batch)


def test_train_returns_the_logprobs_of_its_first_pass_and_nan_where_nothing_is_trained(
    model_dir: Path, random_groups: RandomGroups
) -> None:
    groups = random_groups(7, num_groups=4)
    groups[0][0].response = Tokens().append([5, 6], [-1.0, -1.0], model_step=0).append([7, 8], trained=False)
    batch = prepare_batch(groups, train_step=1)
    for updates in (1, 2):
        worker = new_worker(model_dir, updates_per_batch=updates)
        scored = asyncio.run(worker.score(batch))
        logprobs = asyncio.run(worker.train(batch)).logprobs
        assert list(logprobs) == list(scored) == [answer.rollout_id for answer in batch.answers]
        [first] = logprobs["g0/0"]
        assert first.dtype == np.float32
        assert np.isnan(first).tolist() == [False, False, True, True]
        # A second update starts from other weights than those that were scored.
        same = [rollout for rollout in logprobs if updates == 1 or rollout.startswith(("g0", "g1"))]
        for rollout in same:
            [found], [expected] = logprobs[rollout], scored[rollout]
            computed = ~np.isnan(found)
            np.testing.assert_allclose(found[computed], expected[computed], atol=1e-6)
