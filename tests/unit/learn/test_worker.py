import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from penstock.errors import ModelError, RunError, StepRefused, StorageError
from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.config import LossConfig, TrainWorkerConfig
from penstock.learn.load import can_share_prompts, check_head
from penstock.learn.losses import LossTerms, LossTokens
from penstock.learn.worker import TorchTrainWorker
from penstock.rollout import Group

RandomGroups = Callable[..., list[Group]]


@pytest.fixture
def batch(random_groups: RandomGroups) -> TrainBatch:
    return prepare_batch(random_groups(7, num_groups=4), train_step=1)


def _worker(model_dir: Path, **fields: Any) -> TorchTrainWorker:
    return TrainWorkerConfig(**{"lr": 1e-3, **fields}).build(model_dir, total_steps=10, threads=1)


def _weights(worker: TorchTrainWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.tensors()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _with_advantage(batch: TrainBatch, advantage: float) -> TrainBatch:
    groups = [
        replace(g, answers=[replace(a, advantages=np.full_like(a.advantages, advantage)) for a in g.answers])
        for g in batch.groups
    ]
    return replace(batch, groups=groups)


def exploding_after_the_first_update(tokens: LossTokens, config: LossConfig) -> LossTerms:
    """Finite on the first half of the groups, infinite on the second: told apart by their advantages."""
    late = (tokens.advantages.abs() > 100).any()
    return LossTerms(-tokens.advantages * tokens.logprobs * (torch.inf if late else 1.0))


def with_a_gradient_that_is_not_a_number(tokens: LossTokens, config: LossConfig) -> LossTerms:
    return LossTerms((tokens.logprobs - tokens.logprobs.detach()).sqrt())


def test_training_raises_the_logprob_of_better_answers(model_dir: Path, batch: TrainBatch) -> None:
    worker = _worker(model_dir)
    before = worker.score(batch)
    for _ in range(5):
        metrics = worker.train(batch)
    after = worker.score(batch)
    gain = [float((b - a).mean()) for a, b in zip(before, after, strict=True)]
    scores = [float(answer.advantages[0]) for answer in batch.answers]
    assert np.corrcoef(gain, scores)[0, 1] > 0.5
    assert metrics["tokens"] == batch.metrics["trained_tokens"]
    assert metrics["lr"] == 1e-3
    assert {"loss", "grad_norm", "entropy", "clip_fraction_low", "clip_fraction_high", "tokens_per_s"} < metrics.keys()
    assert {"mismatch/mean_abs", "mismatch/max_abs", "mismatch/k3_kl", "mismatch/ess"} < metrics.keys()
    assert {"seconds/forward", "seconds/backward", "seconds/optimizer", "seconds/total"} < metrics.keys()


def test_the_mismatch_is_that_of_the_engine_and_the_trainer(
    model_dir: Path, batch: TrainBatch, random_groups: RandomGroups
) -> None:
    worker = _worker(model_dir)
    scored = np.concatenate(worker.score(batch))
    recorded = np.concatenate([answer.logprobs for answer in batch.answers])
    metrics = worker.train(batch)
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
        loss = LossConfig(**aggregation)
        # One step of AdamW is nearly the sign of the gradient; a large eps keeps it linear and comparable.
        results = [_worker(model_dir, loss=loss, eps=1.0, **way).train(batch) for way in ways]
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
            worker.train(batch)
        weights.append(_weights(worker))
    assert _same(*weights)
    assert not torch.are_deterministic_algorithms_enabled()


def test_one_step_is_that_of_a_plain_loop_over_the_answers(model_dir: Path, batch: TrainBatch) -> None:
    worker = _worker(model_dir, max_grad_norm=0.5, weight_decay=0.1)
    metrics = worker.train(batch)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    total = sum(answer.num_trained for answer in batch.answers)
    for group in batch.groups:
        for answer in group.answers:
            ids = torch.tensor([*group.prompt_ids.tolist(), *answer.ids.tolist()])
            table = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1]
            logprobs = table.gather(1, ids[1:, None])[len(group.prompt_ids) - 1 :, 0]
            (-(logprobs * torch.from_numpy(answer.advantages)).sum() / total).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    optimizer.step()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    expected = dict(model.named_parameters())
    for name, tensor in worker.tensors():
        # AdamW's first step is lr times the gradient's sign; a gradient near 0 may turn, so two steps apart at most.
        difference = (tensor - expected[name].detach()).abs()
        assert difference.max() <= 2.1e-3
        assert (difference > 1e-5).float().mean() < 0.01, name


def test_off_policy_steps_clip_against_the_engine_and_on_policy_ones_do_not(
    model_dir: Path, random_groups: RandomGroups
) -> None:
    groups = random_groups(8, num_groups=4)
    on_policy = _worker(model_dir).train(prepare_batch(groups, train_step=1))
    stale = _worker(model_dir).train(prepare_batch(groups, train_step=2))
    twice = _worker(model_dir, updates_per_batch=2).train(prepare_batch(groups, train_step=1))
    assert on_policy["clip_fraction_low"] == on_policy["clip_fraction_high"] == 0
    assert stale["clip_fraction_low"] > 0
    assert twice["clip_fraction_low"] > 0


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_step_that_is_not_finite_changes_nothing(model_dir: Path, batch: TrainBatch, share_prompts: bool) -> None:
    worker, twin = _worker(model_dir, share_prompts=share_prompts), _worker(model_dir, share_prompts=share_prompts)
    worker.train(batch)
    twin.train(batch)
    weights, state = _weights(worker), {k: v.clone() for k, v in worker.state_dict().items()}
    poisoned = _with_advantage(batch, float("inf"))
    with pytest.raises(StepRefused, match="train step 1: loss is"):
        worker.train(poisoned)
    assert _same(_weights(worker), weights)
    assert _same(worker.state_dict(), state)
    assert all(parameter.grad is None for parameter in worker.model.parameters())
    worker.train(batch)
    twin.train(batch)
    assert _same(_weights(worker), _weights(twin))


def test_a_finite_loss_with_a_gradient_that_is_not_is_refused(model_dir: Path, batch: TrainBatch) -> None:
    loss = LossConfig(name=f"{__name__}.with_a_gradient_that_is_not_a_number")
    worker = _worker(model_dir, loss=loss)
    weights = _weights(worker)
    with pytest.raises(StepRefused, match=r"loss is 0\.0, gradient norm is nan"):
        worker.train(batch)
    assert _same(_weights(worker), weights)
    assert worker.steps_done == 0


def test_a_refused_second_update_takes_the_first_back(model_dir: Path, batch: TrainBatch) -> None:
    loss = LossConfig(name=f"{__name__}.exploding_after_the_first_update")
    worker = _worker(model_dir, updates_per_batch=2)
    worker.train(batch)
    exploding = _worker(model_dir, updates_per_batch=2, loss=loss)
    exploding.load_state_dict(worker.state_dict())
    weights, state = _weights(exploding), {k: v.clone() for k, v in exploding.state_dict().items()}
    half = len(batch.groups) // 2
    late = _with_advantage(batch, 1000.0).groups[half:]
    with pytest.raises(StepRefused):
        exploding.train(TrainBatch(2, [*batch.groups[:half], *late]))
    assert _same(_weights(exploding), weights)
    assert _same(exploding.state_dict(), state)


def test_a_batch_with_fewer_groups_than_updates_is_an_error(model_dir: Path, batch: TrainBatch) -> None:
    with pytest.raises(RunError, match="updates_per_batch is 5, but train step 1 has 4 groups"):
        _worker(model_dir, updates_per_batch=5).train(batch)


def test_the_schedule_that_is_configured_is_used(model_dir: Path, batch: TrainBatch) -> None:
    worker = _worker(model_dir, warmup_steps=2, schedule="linear")
    assert [worker.train(batch)["lr"] for _ in range(3)] == pytest.approx([5e-4, 1e-3, 1e-3 * 7 / 8])


def test_a_run_continued_from_its_state_gives_the_same_bits(model_dir: Path, batch: TrainBatch, tmp_path: Path) -> None:
    whole = _worker(model_dir, warmup_steps=3)
    whole.train(batch)
    whole.save_hf(str(tmp_path / "saved"))
    state = {key: value.clone() for key, value in whole.state_dict().items()}
    whole.train(batch)
    resumed = _worker(tmp_path / "saved", warmup_steps=3)
    resumed.load_state_dict(state)
    resumed.train(batch)
    assert resumed.steps_done == 2
    assert _same(_weights(resumed), _weights(whole))


def test_a_state_of_another_model_is_refused_and_changes_nothing(model_dir: Path, batch: TrainBatch) -> None:
    worker = _worker(model_dir)
    worker.train(batch)
    state = worker.state_dict()
    with pytest.raises(RunError, match=r"unknown \['nowhere'\]"):
        worker.load_state_dict({**state, "exp_avg.nowhere": torch.zeros(1)})
    with pytest.raises(RunError, match="no steps_done"):
        worker.load_state_dict({key: value for key, value in state.items() if key != "steps_done"})
    assert worker.steps_done == 1
    assert _same(worker.state_dict(), state)


def test_the_tensors_have_the_names_of_the_saved_model(model_dir: Path) -> None:
    worker = _worker(model_dir)
    saved = load_file(model_dir / "model.safetensors")
    assert _same(_weights(worker), saved)
    assert "lm_head.weight" not in saved


def test_a_saved_model_appears_whole_replaces_the_old_and_keeps_the_tokenizer(
    model_dir: Path, batch: TrainBatch, tmp_path: Path
) -> None:
    worker = _worker(model_dir)
    target = tmp_path / "hf" / "step-1"
    worker.save_hf(str(target))
    worker.train(batch)
    worker.save_hf(str(target))
    assert _same(load_file(target / "model.safetensors"), _weights(worker))
    assert (target / "tokenizer_config.json").read_text() == "{}"
    assert [path.name for path in target.parent.iterdir()] == ["step-1"]


def test_a_place_that_cannot_be_written_is_a_storage_error(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="could not be written"):
        _worker(model_dir).save_hf(str(tmp_path / "file" / "model"))


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        _worker(tmp_path)


def test_a_model_that_lacks_weights_is_refused(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "partial")
    weights = load_file(model_dir / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "partial" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, among them model\.norm\.weight"):
        _worker(tmp_path / "partial")


SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}


def test_a_sliding_window_is_trained_without_sharing_prompts() -> None:
    config = MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4, pad_token_id=0)
    model = MistralForCausalLM(config).eval()
    check_head(model)
    assert not can_share_prompts(model)


def test_a_model_with_learned_positions_may_share_prompts() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()
    check_head(model)
    assert can_share_prompts(model)


def test_a_model_with_weights_that_are_not_numbers_is_refused(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ModelError, match="by nan"):
        check_head(model)


def test_a_model_that_scales_its_logits_is_refused() -> None:
    torch.manual_seed(0)
    config = CohereConfig(**SMALL, logit_scale=0.1, initializer_range=0.5, pad_token_id=0)
    with pytest.raises(ModelError, match="changes its logits afterwards"):
        check_head(CohereForCausalLM(config).eval())


def _gradient(model_dir: Path, batch: TrainBatch, **fields: Any) -> torch.Tensor:
    """That of a first step, read from the optimiser's first moment."""
    worker = _worker(model_dir, max_grad_norm=1e9, **fields)
    worker.train(batch)
    assert {str(tensor.dtype) for _, tensor in worker.tensors()} == {"torch.float32"}
    return torch.cat([v.flatten() for key, v in worker.state_dict().items() if key.startswith("exp_avg.")])


@pytest.mark.parametrize("fused", [True, False])
def test_bfloat16_gives_nearly_the_gradient_of_float32_and_keeps_float32_weights(
    model_dir: Path, batch: TrainBatch, fused: bool
) -> None:
    exact = _gradient(model_dir, batch, fused=fused)
    rounded = _gradient(model_dir, batch, fused=fused, dtype="bfloat16")
    assert not torch.equal(exact, rounded)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.995
    assert float(rounded.norm()) == pytest.approx(float(exact.norm()), rel=0.05)


def test_bfloat16_logprobs_are_near_those_of_float32(model_dir: Path, batch: TrainBatch) -> None:
    exact, rounded = (np.concatenate(_worker(model_dir, dtype=d).score(batch)) for d in ("float32", "bfloat16"))
    # Logits of this model reach 10; bfloat16 has 8 bits.
    assert np.abs(exact - rounded).mean() < 0.03
    assert np.abs(exact - rounded).max() < 0.2


def test_a_device_that_is_not_there_is_refused_by_name(model_dir: Path) -> None:
    with pytest.raises(ModelError, match="device is 'warp', which cannot be used here"):
        _worker(model_dir, device="warp")


@pytest.mark.parametrize(("fused", "deterministic"), [(True, False), (True, True), (False, False)])
def test_auto_is_bfloat16_for_the_fused_passes_of_a_run_that_need_not_be_deterministic(
    fused: bool, deterministic: bool, model_dir: Path, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.models.bfloat16.has_fast_products", lambda: True)
    config = TrainWorkerConfig(dtype="auto", fused=fused)
    worker = config.build(model_dir, total_steps=10, threads=1, deterministic=deterministic)
    assert worker.train(batch)["bfloat16"] == (fused and not deterministic)


def test_weights_that_are_loaded_count_in_bfloat16_at_once(model_dir: Path, batch: TrainBatch) -> None:
    worker, twin = _worker(model_dir, dtype="bfloat16"), _worker(model_dir, dtype="bfloat16")
    before = np.concatenate(worker.score(batch))
    worker.train(batch)
    twin.load_tensors(_weights(worker))
    after = np.concatenate(twin.score(batch))
    assert (after != before).any()
    assert np.array_equal(after, np.concatenate(worker.score(batch)))
