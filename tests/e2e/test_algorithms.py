"""The recipes of the algorithms, as a user runs them: each learns."""

from __future__ import annotations

import json
import resource
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock import CorrectionConfig, CustomLossConfig, KLConfig, LoRAConfig, OverlongConfig, SampleParams
from penstock.cli.config_file import load_config
from penstock.errors import CheckpointError
from penstock.trainer.config_changes import refused_differences


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.mark.long_tier
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["dapo-tiny", "gspo-tiny", "cispo-tiny", "dppo-tiny-async", "distill-tiny"])
def test_each_recipe_learns_within_ninety_seconds_of_one_core(recipe, tmp_path, read_lines):
    before = _cpu_seconds()
    # The first 14 of its 30 to 40 steps: so much is learned by then.
    config = load_config(recipe, ["total_steps=14", "evaluator.eval_sample_num=100", "cpu_threads=1"])
    config.build(run_dir=tmp_path / "run").fit()
    # Not of the clock, which is others' too.
    assert _cpu_seconds() - before < 90
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_accuracy_after"] - summary["eval_accuracy_before"] >= 0.3, summary
    steps = _steps(tmp_path / "run", read_lines)
    rewards = [line["reward/mean"] for line in steps]
    if recipe != "dapo-tiny":
        # What dynamic sampling lets through is never all right.
        assert np.mean(rewards[-5:]) - np.mean(rewards[:2]) >= 0.3, rewards


def _steps(run_dir, read_lines):
    return [line for line in read_lines(run_dir / "metrics.jsonl") if "reward/mean" in line]


SHORT = ["total_steps=2", "evaluator=null", "train_batch_size=4", "cpu_threads=1"]


def _kl(estimator: str, place: str) -> str:
    return f'train.kl={{"coef": 0.1, "estimator": "{estimator}", "place": "{place}"}}'


SEVERAL = ["train.updates_per_batch=2", "train.epochs_per_batch=2"]


@pytest.mark.parametrize(
    ("loss", "correction", "advantage", "more"),
    [
        ("ppo", "none", "dr_grpo", [_kl("k1", "loss"), *SEVERAL]),
        ("ppo", "decoupled", "rloo", [_kl("k2", "loss"), "train.loss.entropy_coef=0.01", *SEVERAL]),
        ("gspo", "seq_mis", "opo", ["train.max_tokens_per_micro_batch=64"]),
        ("gspo", "bypass_geo_rs", "grpo", [_kl("k3", "reward"), 'train.overlong={"buffer_tokens": 2}']),
        ("cispo", "geo_rs", "maxrl", ['train.overlong={"mask_truncated": true}', *SEVERAL]),
        ("cispo", "bypass", "reinforce_plus_plus", [_kl("k2", "reward"), "train.gamma=0.9"]),
        ("dppo", "icepop", "reinforce_plus_plus_baseline", [_kl("k3", "loss"), *SEVERAL]),
        ("pg", "tis", "pass_at_k", [_kl("k3+", "loss"), "train.fused=false"]),
        ("pg", "seq_tis", "grpo", [_kl("k1", "reward"), 'train.lora={"rank": 4, "sync": "adapter"}', *SEVERAL]),
    ],
)
def test_every_option_trains_through_the_real_trainer_on_fresh_and_on_stale_answers(
    loss, correction, advantage, more, tmp_path, read_lines
):
    chosen = [f"train.loss={loss}", f"train.correction={correction}", f"train.advantage={advantage}"]
    config = load_config("tiny", [*SHORT, "sync_weights_interval=2", *chosen, *more])
    config.build(run_dir=tmp_path / "run").fit()
    first, second = _steps(tmp_path / "run", read_lines)
    assert all(np.isfinite(value) for line in (first, second) for value in line.values() if isinstance(value, float))
    assert first["train/mismatch/max_abs"] < 1e-4
    # With right or wrong alone, the two best of a group are mostly both right.
    assert first["train/grad_norm"] > 0 or advantage == "pass_at_k"
    assert (first["staleness/max"], second["staleness/max"]) == (0, 1)
    assert second["train/mismatch/max_abs"] > 1e-3 or advantage == "pass_at_k"


def test_tasks_may_sample_at_different_temperatures(tmp_path, read_lines):
    tiny = load_config("tiny", SHORT)
    first = tiny.manager.tasks[0]
    second = first.replace("task_name", "hot").replace(
        "agent_loop_config.sample_params", SampleParams(temperature=1.7, max_tokens=8)
    )
    first = first.replace("agent_loop_config.sample_params", SampleParams(temperature=0.6, max_tokens=8))
    tiny.replace("manager.tasks", [first, second]).build(run_dir=tmp_path / "run").fit()
    step = _steps(tmp_path / "run", read_lines)[0]
    # Trainer and engines agree on every token, each at its own temperature.
    assert step["train/mismatch/max_abs"] < 1e-4
    assert {"reward/reverse/mean", "reward/hot/mean"} <= step.keys()


def test_a_run_with_an_adapter_keeps_the_adapter_alone_and_goes_on_from_it(tmp_path, read_lines, model_cache):
    config = (
        load_config("tiny", SHORT).replace("train.lora", LoRAConfig(rank=4)).replace("train.kl", KLConfig(coef=0.1))
    )
    run_dir = tmp_path / "run"
    config.build(run_dir=run_dir).fit()
    [weights] = (run_dir / "checkpoints").glob("*2/model.safetensors")
    assert all("lora_" in name for name in load_file(weights))
    whole = (model_cache / "tiny-1" / "model.safetensors").stat().st_size
    assert weights.stat().st_size < whole / 3
    assert (run_dir / "hf" / "final" / "adapter" / "adapter_config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(model_cache / "tiny-1")
    import peft  # it takes seconds, and every test process would import it to know its tests

    peft.PeftModel.from_pretrained(base, run_dir / "hf" / "final" / "adapter")
    config.replace("total_steps", 3).build(run_dir=run_dir, resume="newest").fit()
    steps = _steps(run_dir, read_lines)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[0]["train/reference_kl"] == 0 < steps[2]["train/reference_kl"]
    assert max(step["train/mismatch/max_abs"] for step in steps) < 1e-4


def test_an_adapter_is_not_resumed_on_another_base(tmp_path, model_cache):
    base = tmp_path / "base"
    shutil.copytree(model_cache / "tiny-1", base)
    config = load_config("tiny", SHORT).replace("model", str(base)).replace("train.lora", LoRAConfig(rank=4))
    config.build(run_dir=tmp_path / "run").fit()
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="was made from another model"):
        config.replace("total_steps", 3).build(run_dir=tmp_path / "run", resume="newest").fit()


def test_a_kl_in_the_reward_and_over_long_shaping_reach_the_advantages(tmp_path, read_lines):
    config = (
        load_config("tiny", SHORT)
        .replace("train.kl", KLConfig(coef=0.5, place="reward", estimator="k1"))
        .replace("train.overlong", OverlongConfig(buffer_tokens=4, mask_truncated=True))
        .replace("train.advantage", "reinforce_plus_plus")
        .replace("train.gamma", 0.9)
    )
    config.build(run_dir=tmp_path / "run").fit()
    first, second = _steps(tmp_path / "run", read_lines)
    assert first["reward/shaped_mean"] < first["reward/mean"]
    # Before the first step policy and reference are one.
    assert first["train/reference_kl"] == pytest.approx(0, abs=1e-9) and second["train/reference_kl"] > 0


def test_a_run_of_the_second_format_is_resumed_and_another_loss_is_refused(tmp_path):
    """Its loss had a name and all fields of all losses."""
    tiny = load_config("tiny", [])
    saved = json.loads(json.dumps(tiny.describe()))
    saved["train"] = {
        key: value
        for key, value in saved["train"].items()
        if key not in ("correction", "kl", "lora", "overlong", "gamma", "epochs_per_batch")
    } | {
        "loss": {
            "class": "LossConfig", "name": "ppo", "clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 3.0,
            "aggregation": "token-mean", "constant_length": None, "importance_cap": None,
        }
    }  # fmt: skip
    assert refused_differences(saved, tiny.describe()) == []
    refused = [d.path for d in refused_differences(saved, tiny.replace("train.loss", "gspo").describe())]
    assert "train.loss.class" in refused
    saved["train"]["loss"] |= {"name": "policy_gradient", "importance_cap": 2.0}
    capped = CorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
    now = tiny.replace("train.loss", "pg").replace("train.correction", capped)
    assert refused_differences(saved, now.describe()) == []
    assert refused_differences(saved, now.replace("train.correction", "none").describe()) != []
    saved["train"]["loss"] |= {"name": "own.module.loss", "importance_cap": None}
    custom = tiny.replace("train.loss", CustomLossConfig(function="own.module.loss"))
    assert refused_differences(saved, custom.describe()) == []
