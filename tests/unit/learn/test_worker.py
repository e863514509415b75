import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
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
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from penstock.errors import CheckpointError, ModelError, RunError, StepRefused, StorageError, UserFunctionError
from penstock.learn.batch import BatchSettings, TrainAnswer, TrainBatch, prepare_batch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.load import can_share_prompts, check_head
from penstock.learn.losses import CustomLossConfig, LossTerms, LossTokens, PPOLossConfig
from penstock.learn.overlong import OverlongConfig
from penstock.learn.save import save_hf
from penstock.learn.worker import TorchTrainWorker
from penstock.models.context import attention_window
from penstock.rollout import FinishReason, FloatArray, Group, Tokens
from penstock.trainer.checkpoints import CheckpointStore

RandomGroups = Callable[..., list[Group]]


@pytest.fixture
def batch(random_groups: RandomGroups) -> TrainBatch:
    return prepare_batch(random_groups(7, num_groups=4), train_step=1)


def _worker(model_dir: Path, **fields: Any) -> TorchTrainWorker:
    return TrainWorkerConfig(**{"lr": 1e-3, **fields}).build(model_dir, total_steps=10, threads=1)


def _train(worker: TorchTrainWorker, batch: TrainBatch) -> dict[str, float]:
    return asyncio.run(worker.train(batch)).metrics


def _scores(worker: TorchTrainWorker, batch: TrainBatch) -> list[FloatArray]:
    """Of every segment, in the batch's order."""
    return [segment for rollout in asyncio.run(worker.score(batch)).values() for segment in rollout]


def _state(worker: TorchTrainWorker) -> dict[str, torch.Tensor]:
    """Optimiser and schedule, as they are saved."""
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(worker.save(Path(directory)))
        return load_file(Path(directory) / "optimizer.safetensors")


def _continue(first: TorchTrainWorker, second: TorchTrainWorker) -> None:
    """The second goes on from where the first stands."""
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(first.save(Path(directory)))
        asyncio.run(second.load(Path(directory)))


def _weights(worker: TorchTrainWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.weights.tensors()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _with_advantage(batch: TrainBatch, advantage: float) -> TrainBatch:
    def changed(answer: TrainAnswer) -> TrainAnswer:
        return replace(
            answer,
            advantage=advantage,
            segments=[replace(s, advantages=np.full_like(s.advantages, advantage)) for s in answer.segments],
        )

    return replace(batch, groups=[replace(g, answers=[changed(a) for a in g.answers]) for g in batch.groups])


def exploding_after_the_first_update(tokens: LossTokens, config: CustomLossConfig) -> LossTerms:
    """Finite on the first half of the groups, infinite on the second: told apart by their advantages."""
    late = (tokens.advantages.abs() > 100).any()
    return LossTerms(-tokens.advantages * tokens.logprobs * (torch.inf if late else 1.0))


def with_a_gradient_that_is_not_a_number(tokens: LossTokens, config: CustomLossConfig) -> LossTerms:
    return LossTerms((tokens.logprobs - tokens.logprobs.detach()).sqrt())


def test_training_raises_the_logprob_of_better_answers(model_dir: Path, batch: TrainBatch) -> None:
    worker = _worker(model_dir)
    before = _scores(worker, batch)
    for _ in range(5):
        metrics = _train(worker, batch)
    after = _scores(worker, batch)
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
    worker = _worker(model_dir)
    scored = np.concatenate(_scores(worker, batch))
    recorded = np.concatenate([segment.logprobs for segment in batch.segments])
    metrics = _train(worker, batch)
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
        results = [_train(_worker(model_dir, loss=loss, eps=1.0, **way), batch) for way in ways]
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
            _train(worker, batch)
        weights.append(_weights(worker))
    assert _same(*weights)
    assert not torch.are_deterministic_algorithms_enabled()


def test_one_step_is_that_of_a_plain_loop_over_the_answers(model_dir: Path, batch: TrainBatch) -> None:
    worker = _worker(model_dir, max_grad_norm=0.5, weight_decay=0.1)
    metrics = _train(worker, batch)
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
    on_policy = _train(_worker(model_dir), prepare_batch(groups, train_step=1))
    stale = _train(_worker(model_dir), prepare_batch(groups, train_step=2))
    twice = _train(_worker(model_dir, updates_per_batch=2), prepare_batch(groups, train_step=1))
    assert on_policy["clip_fraction_low"] == on_policy["clip_fraction_high"] == 0
    assert stale["clip_fraction_low"] > 0
    assert twice["clip_fraction_low"] > 0


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_step_that_is_not_finite_changes_nothing(model_dir: Path, batch: TrainBatch, share_prompts: bool) -> None:
    worker, twin = _worker(model_dir, share_prompts=share_prompts), _worker(model_dir, share_prompts=share_prompts)
    _train(worker, batch)
    _train(twin, batch)
    weights, state = _weights(worker), _state(worker)
    poisoned = _with_advantage(batch, float("inf"))
    with pytest.raises(StepRefused, match="train step 1: loss is"):
        _train(worker, poisoned)
    assert _same(_weights(worker), weights)
    assert _same(_state(worker), state)
    assert all(parameter.grad is None for parameter in worker.model.parameters())
    _train(worker, batch)
    _train(twin, batch)
    assert _same(_weights(worker), _weights(twin))


def test_a_finite_loss_with_a_gradient_that_is_not_is_refused(model_dir: Path, batch: TrainBatch) -> None:
    loss = CustomLossConfig(function=f"{__name__}.with_a_gradient_that_is_not_a_number")
    worker = _worker(model_dir, loss=loss)
    weights = _weights(worker)
    with pytest.raises(StepRefused, match=r"loss is 0\.0, gradient norm is nan"):
        _train(worker, batch)
    assert _same(_weights(worker), weights)
    assert int(_state(worker)["steps_done"]) == 0


def test_a_refused_second_update_takes_the_first_back(model_dir: Path, batch: TrainBatch) -> None:
    loss = CustomLossConfig(function=f"{__name__}.exploding_after_the_first_update")
    worker = _worker(model_dir, updates_per_batch=2)
    _train(worker, batch)
    exploding = _worker(model_dir, updates_per_batch=2, loss=loss)
    _continue(worker, exploding)
    weights, state = _weights(exploding), _state(exploding)
    half = len(batch.groups) // 2
    late = _with_advantage(batch, 1000.0).groups[half:]
    with pytest.raises(StepRefused):
        _train(exploding, TrainBatch(2, [*batch.groups[:half], *late]))
    assert _same(_weights(exploding), weights)
    assert _same(_state(exploding), state)


@pytest.mark.parametrize("fields", [{}, {"updates_per_batch": 2, "correction": "tis"}])
def test_a_batch_of_nothing_but_cut_off_answers_is_a_step_that_changes_no_weight(
    model_dir: Path, random_groups: RandomGroups, fields: dict[str, Any]
) -> None:
    groups = random_groups(7, num_groups=2)
    for rollout in (rollout for group in groups for rollout in group):
        rollout.finish_reason = FinishReason.LENGTH
    settings = BatchSettings(overlong=OverlongConfig(mask_truncated=True))
    batch = prepare_batch(groups, train_step=1, settings=settings)
    worker = _worker(model_dir, lr=1e-2, weight_decay=0.1, **fields)
    before = {name: tensor.clone() for name, tensor in _weights(worker).items()}
    metrics = _train(worker, batch)
    assert metrics["tokens"] == 0 and "loss" not in metrics
    assert np.isfinite(list(metrics.values())).all()
    assert _same(before, _weights(worker))


def test_a_batch_with_fewer_groups_than_updates_is_an_error(model_dir: Path, batch: TrainBatch) -> None:
    with pytest.raises(RunError, match="updates_per_batch is 5, but train step 1 has 4 groups"):
        _train(_worker(model_dir, updates_per_batch=5), batch)


def test_the_schedule_that_is_configured_is_used(model_dir: Path, batch: TrainBatch) -> None:
    worker = _worker(model_dir, warmup_steps=2, schedule="linear")
    assert [_train(worker, batch)["lr"] for _ in range(4)] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3 * 7 / 8])


def test_a_run_continued_from_what_was_saved_gives_the_same_bits(model_dir: Path, batch: TrainBatch) -> None:
    whole, resumed = _worker(model_dir, warmup_steps=3), _worker(model_dir, warmup_steps=3)
    _train(whole, batch)
    _continue(whole, resumed)
    rates = [_train(worker, batch)["lr"] for worker in (whole, resumed)]
    assert rates == [2e-3 / 3] * 2
    assert _same(_weights(resumed), _weights(whole))
    assert _same(_state(resumed), _state(whole))


def _spoilt(directory: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(directory / name)
    change(tensors)
    save_file(tensors, directory / name)
    return directory


def _forget(state: dict[str, torch.Tensor], parameter: str) -> None:
    for key in [key for key in state if key.endswith(f".{parameter}")]:
        del state[key]


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("optimizer", lambda t: t.update({"exp_avg.nowhere": torch.zeros(1)}), r"unknown \['nowhere'\]"),
        ("optimizer", lambda t: t.pop("steps_done"), "no steps_done"),
        ("optimizer", lambda t: _forget(t, "model.norm.weight"), r"missing \['model.norm.weight'\]"),
        ("optimizer", lambda t: t.update({"exp_avg.model.norm.weight": torch.zeros(3)}), "of another shape"),
        ("model", lambda t: t.pop("model.norm.weight"), r"\['model.norm.weight'\] are missing or differ"),
        ("model", lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "are missing or differ"),
    ],
)
def test_a_state_of_another_model_is_refused_and_changes_nothing(
    model_dir: Path,
    batch: TrainBatch,
    tmp_path: Path,
    name: str,
    change: Callable[[dict[str, torch.Tensor]], None],
    problem: str,
) -> None:
    worker = _worker(model_dir)
    asyncio.run(worker.save(tmp_path))
    _train(worker, batch)
    other = tmp_path / "other"
    other.mkdir()
    asyncio.run(worker.save(other))
    weights, state = _weights(worker), _state(worker)
    with pytest.raises(CheckpointError, match=problem):
        asyncio.run(worker.load(_spoilt(other, f"{name}.safetensors", change)))
    assert _same(_weights(worker), weights)
    assert _same(_state(worker), state)


def test_files_that_are_missing_or_damaged_are_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    worker = _worker(model_dir)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be loaded"):
        asyncio.run(worker.load(tmp_path))
    asyncio.run(worker.save(tmp_path))
    (tmp_path / "optimizer.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors cannot be loaded"):
        asyncio.run(worker.load(tmp_path))
    with pytest.raises(StorageError, match=r"model\.safetensors could not be written"):
        asyncio.run(worker.save(tmp_path / "nowhere"))


def test_saved_files_may_be_read_as_any_other_file(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    worker = _worker(model_dir)
    asyncio.run(worker.save(tmp_path))
    asyncio.run(worker.save_hf(tmp_path / "hf"))
    modes = {path.name: path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert len(modes) >= 5
    assert set(modes.values()) == {modes["any"]}


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
    asyncio.run(worker.save_hf(target))
    _train(worker, batch)
    asyncio.run(worker.save_hf(target))
    assert _same(load_file(target / "model.safetensors"), _weights(worker))
    assert (target / "tokenizer_config.json").read_text() == "{}"
    assert [path.name for path in target.parent.iterdir()] == ["step-1"]


class Killed(BaseException):
    pass


class KilledWhileSaving:
    """A model whose process is killed when half of it is written."""

    def save_pretrained(self, directory: Path) -> None:
        (directory / "config.json").touch()
        raise Killed


def test_killed_between_the_renames_and_killed_again_the_old_export_is_whole(model_dir: Path, tmp_path: Path) -> None:
    target, hidden = tmp_path / "final", [tmp_path / ".final.replaced", tmp_path / ".final.unfinished"]
    asyncio.run(_worker(model_dir).save_hf(target))
    kept = (target / "model.safetensors").read_bytes()
    target.rename(hidden[0])
    hidden[1].mkdir()
    with pytest.raises(Killed):
        save_hf(KilledWhileSaving(), model_dir, target)
    assert (target / "model.safetensors").read_bytes() == kept


def test_a_place_that_cannot_be_written_is_a_storage_error(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="could not be written"):
        asyncio.run(_worker(model_dir).save_hf(tmp_path / "file" / "model"))


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


@pytest.mark.parametrize(
    "named", [True, False], ids=["a window that the configuration names", "a window that only the layers know"]
)
def test_local_attention_is_trained_without_sharing_prompts(named: bool) -> None:
    """Its window of 64 tokens is measured along the row, where other answers stand between an answer and its prompt."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 512, "vocab_size": 50}
    layers = {"attention_types": [[["global", "local"], 1]], "window_size": 64, "initializer_range": 0.3}
    model = GPTNeoForCausalLM(GPTNeoConfig(**shape, **layers, bos_token_id=0, eos_token_id=0)).eval()
    if not named:
        model.config.attention_layers = ["global", "global"]
    assert attention_window(model.config) == (64 if named else None)
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
    _train(worker, batch)
    assert {str(tensor.dtype) for _, tensor in worker.weights.tensors()} == {"torch.float32"}
    return torch.cat([v.flatten() for key, v in _state(worker).items() if key.startswith("exp_avg.")])


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
    exact, rounded = (np.concatenate(_scores(_worker(model_dir, dtype=d), batch)) for d in ("float32", "bfloat16"))
    # Logits of this model reach 10; bfloat16 has 8 bits.
    assert np.abs(exact - rounded).mean() < 0.03
    assert np.abs(exact - rounded).max() < 0.2


def test_a_device_that_is_not_there_is_refused_by_name(model_dir: Path) -> None:
    with pytest.raises(ModelError, match="device is 'warp', which cannot be used here"):
        _worker(model_dir, device="warp")


@pytest.mark.parametrize(("fused", "deterministic"), [(True, False), (True, True), (False, False)])
def test_auto_is_what_was_faster_for_the_fused_passes_of_a_run_that_need_not_be_deterministic(
    fused: bool, deterministic: bool, model_dir: Path, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.models.arithmetic.try_out", lambda work: {"float32": 2.0, "bfloat16": 1.0})
    config = TrainWorkerConfig(dtype="auto", fused=fused)
    worker = config.build(model_dir, total_steps=10, threads=1, deterministic=deterministic)
    assert _train(worker, batch)["bfloat16"] == (fused and not deterministic)


def test_weights_that_are_loaded_count_in_bfloat16_at_once(model_dir: Path, batch: TrainBatch) -> None:
    worker, twin = _worker(model_dir, dtype="bfloat16"), _worker(model_dir, dtype="bfloat16")
    before = np.concatenate(_scores(worker, batch))
    _train(worker, batch)
    _continue(worker, twin)
    after = np.concatenate(_scores(twin, batch))
    assert (after != before).any()
    assert np.array_equal(after, np.concatenate(_scores(worker, batch)))


def test_norms_and_biases_do_not_decay(tiny_model: Callable[..., Any], batch: TrainBatch, tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    worker = _worker(tmp_path, lr=1e-2, weight_decay=1.0)
    before = _weights(worker)
    # With no advantage there is no gradient: what changes, decays.
    _train(worker, _with_advantage(batch, 0.0))
    unchanged = {name for name, tensor in _weights(worker).items() if torch.equal(tensor, before[name])}
    assert unchanged == {name for name in before if "norm" in name or name.endswith("bias")}


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_in_which_every_group_is_equally_good_follows_the_momentum_without_a_backward_pass(
    model_dir: Path, batch: TrainBatch, fused: bool
) -> None:
    worker = _worker(model_dir, fused=fused)
    _train(worker, batch)
    before, first = _weights(worker), _state(worker)
    metrics = _train(worker, _with_advantage(batch, 0.0))
    assert "seconds/backward" not in metrics and metrics["grad_norm"] == 0.0
    assert not any(torch.equal(tensor, before[name]) for name, tensor in _weights(worker).items())
    momenta = {name: tensor for name, tensor in _state(worker).items() if name.startswith("exp_avg.")}
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
        worker = _worker(tmp_path, fused=fused, share_prompts=share_prompts, max_grad_norm=1e9)
        _train(worker, batch)
        rows.append(_state(worker)["exp_avg.model.embed_tokens.weight"])
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
    worker = _worker(tmp_path, lr=10.0, weight_decay=1.0)
    with pytest.raises(RunError, match="train step 1: the optimiser made weights that are not finite"):
        _train(worker, batch)


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
    worker = _worker(model_dir, loss=CustomLossConfig(function=f"{__name__}.{name}"))
    with pytest.raises(UserFunctionError, match=rf"test_worker\.{name}.*{problem}"):
        _train(worker, batch)


# In a thread of its own.


def test_train_returns_the_logprobs_of_its_first_pass_and_nan_where_nothing_is_trained(
    model_dir: Path, random_groups: RandomGroups
) -> None:
    groups = random_groups(7, num_groups=4)
    groups[0][0].response = Tokens().append([5, 6], [-1.0, -1.0], model_step=0).append([7, 8], trained=False)
    batch = prepare_batch(groups, train_step=1)
    for updates in (1, 2):
        worker = _worker(model_dir, updates_per_batch=updates)
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


_ENTERED, _MAY_GO_ON = threading.Event(), threading.Event()


def that_waits(tokens: LossTokens, config: CustomLossConfig) -> LossTerms:
    _ENTERED.set()
    assert _MAY_GO_ON.wait(60)
    return LossTerms(-tokens.advantages * tokens.logprobs)


@pytest.fixture
def waiting_worker(model_dir: Path) -> Iterator[TorchTrainWorker]:
    """Its first micro-batch of several waits until it may go on."""
    _ENTERED.clear()
    _MAY_GO_ON.clear()
    loss = CustomLossConfig(function=f"{__name__}.that_waits")
    yield _worker(model_dir, loss=loss, max_tokens_per_micro_batch=16)
    _MAY_GO_ON.set()


def test_a_step_that_is_cancelled_has_ended_and_changed_nothing_when_it_returns(
    waiting_worker: TorchTrainWorker, batch: TrainBatch
) -> None:
    before, state = _weights(waiting_worker), _state(waiting_worker)

    async def cancel() -> None:
        training = asyncio.create_task(waiting_worker.train(batch))
        await asyncio.to_thread(_ENTERED.wait, 60)
        training.cancel()
        done, _ = await asyncio.wait([training], timeout=0.05)
        assert not done, "it waits for its thread"
        training.cancel()
        _MAY_GO_ON.set()
        with pytest.raises(asyncio.CancelledError):
            await training

    asyncio.run(cancel())
    assert _same(_weights(waiting_worker), before)
    assert _same(_state(waiting_worker), state)
    assert _train(waiting_worker, batch)["micro_batches"] > 1


def test_what_is_saved_during_a_step_is_what_the_step_came_to(
    waiting_worker: TorchTrainWorker, batch: TrainBatch, tmp_path: Path
) -> None:
    async def save_meanwhile() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(waiting_worker.train(batch))
            await asyncio.to_thread(_ENTERED.wait, 60)
            tasks.create_task(waiting_worker.save(tmp_path))
            await asyncio.sleep(0)
            _MAY_GO_ON.set()

    asyncio.run(save_meanwhile())
    assert _same(load_file(tmp_path / "model.safetensors"), _weights(waiting_worker))
    assert int(load_file(tmp_path / "optimizer.safetensors")["steps_done"]) == 1


def test_a_snapshot_is_written_as_the_worker_was_whatever_it_trains_meanwhile(
    model_dir: Path, batch: TrainBatch, tmp_path: Path
) -> None:
    worker = _worker(model_dir)
    for name in ("then", "later"):
        (tmp_path / name).mkdir()

    async def train_on() -> None:
        await worker.train(batch)
        await worker.save(tmp_path / "then")
        await worker.save_hf(tmp_path / "hf-then")
        snapshot = await worker.snapshot(optimizer=True, export=True)
        await worker.train(batch)
        await snapshot.save(tmp_path / "later")
        await snapshot.save_hf(tmp_path / "hf-later")

    asyncio.run(train_on())
    for then in sorted([*(tmp_path / "then").iterdir(), *(tmp_path / "hf-then").iterdir()]):
        later = tmp_path / then.parent.name.replace("then", "later") / then.name
        assert later.read_bytes() == then.read_bytes(), then
    assert not _same(load_file(tmp_path / "later" / "model.safetensors"), _weights(worker))


def test_a_snapshot_for_an_export_alone_has_no_optimiser(model_dir: Path, batch: TrainBatch, tmp_path: Path) -> None:
    worker = _worker(model_dir)
    _train(worker, batch)
    snapshot = asyncio.run(worker.snapshot(optimizer=False, export=True))
    asyncio.run(snapshot.save(tmp_path))
    assert load_file(tmp_path / "optimizer.safetensors") == {}


def test_a_closed_worker_takes_no_more_work(model_dir: Path, batch: TrainBatch) -> None:
    worker = _worker(model_dir)
    asyncio.run(worker.close())
    with pytest.raises(RuntimeError, match="shutdown"):
        asyncio.run(worker.train(batch))


def test_a_worker_that_fills_a_checkpoint_goes_on_from_it_to_the_bit(
    model_dir: Path, batch: TrainBatch, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    worker, resumed = _worker(model_dir), _worker(model_dir)
    _train(worker, batch)

    async def save_and_load() -> None:
        await store.save(1, fill=worker.save, state={}, config={})
        await resumed.load(store.newest().path)

    asyncio.run(save_and_load())
    _train(worker, batch)
    _train(resumed, batch)
    assert _same(_weights(resumed), _weights(worker))
    assert _same(_state(resumed), _state(worker))
