"""The recipe `tiny` as a user runs it: real model, real engine, real judge processes, real gradients."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_processes import engines_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.cli import main
from penstock.cli.config_file import load_config
from penstock.errors import CheckpointError, StepRefused
from penstock.events import Warned
from penstock.replay.lock import lock_directory
from penstock.trainer.index import INDEX_FILE
from penstock.trainer.metric_names import meaning
from penstock.trainer.observers import read_events


def unexplained(lines):
    """Metrics of a run that the reference does not know."""
    return {name for line in lines for name in line if meaning(name) is None} - {"step", "kind", "time"}


@pytest.mark.sized
def test_tiny_learns_and_leaves_a_complete_run_directory(tiny_run, capsys, read_lines):
    steps = [line for line in read_lines(tiny_run / "metrics.jsonl") if "reward/mean" in line]
    rewards = [line["reward/mean"] for line in steps]
    assert np.mean(rewards[-5:]) - np.mean(rewards[:2]) >= 0.3
    summary = json.loads((tiny_run / "summary.json").read_text())
    assert summary["eval_accuracy_after"] >= 0.9 > 0.6 > summary["eval_accuracy_before"]
    assert summary["steps"] == len(steps)
    assert unexplained(read_lines(tiny_run / "metrics.jsonl")) == set()
    # At staleness 0 the engine's logprobs are the trainer's.
    assert max(line["train/mismatch/max_abs"] for line in steps) < 1e-4
    assert json.loads((tiny_run / "config.json").read_text())["class"] == "RLColocateTrainerConfig"
    assert list((tiny_run / "tensorboard").iterdir())
    assert (tiny_run / "prompts.msgpack").stat().st_size  # what a resume compares the dataset with
    first = read_lines(tiny_run / "trajectories" / "step-000001.jsonl")
    assert len(first) == 128
    assert {"prompt", "answer", "reward", "advantage", "model_steps", "staleness"} <= first[0].keys()
    # What is exported is what was trained, in the format everybody reads.
    AutoModelForCausalLM.from_pretrained(tiny_run / "hf" / "final")
    assert main(["train", "tiny", "--run-dir", str(tiny_run)]) == 2
    assert "exists and is not empty; go on with --resume" in capsys.readouterr().err


def test_the_ledger_lists_groups_by_state_and_saved_rollouts_by_their_words(tiny_run, capsys):
    def said(*arguments):
        code = main(["ledger", str(tiny_run), *arguments])
        return code, "".join(capsys.readouterr()).splitlines()

    code, lines = said("--state", "trained", "--limit", "2")
    assert code == 0 and len(lines) == 2 and all("state trained  train_step 1" in line for line in lines)
    assert said("--state", "discarded") == (0, ["none"])
    last = max((tiny_run / "trajectories").glob("step-*.jsonl"))
    row, step = json.loads(last.read_text().splitlines()[0]), int(last.stem.removeprefix("step-"))
    code, lines = said("--find", row["answer"], "--limit", "1000")
    assert code == 0 and any(f"step {step}  rollout {row['rollout_id']}  reward" in line for line in lines)
    code, lines = said("--state", "trainde")
    assert code == 2 and "Did you mean 'trained'?" in lines[-1]


def test_the_index_of_saved_rollouts_is_made_anew_from_their_trajectories(tiny_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(tiny_run / "trajectories", run / "trajectories")
    row = json.loads((run / "trajectories" / "step-000001.jsonl").read_text().splitlines()[0])

    def said(*arguments):
        code = main(["ledger", str(run), *arguments])
        return code, "".join(capsys.readouterr()).splitlines()

    code, lines = said("--find", row["answer"])
    assert code == 2 and f"penstock ledger {run} --reindex makes it" in lines[-1]
    lock = lock_directory(run)
    code, lines = said("--reindex")
    assert code == 2 and str(os.getpid()) in lines[-1]
    lock.release()
    assert said("--reindex") == (0, [f"{run / INDEX_FILE} is made anew"])
    code, lines = said("--find", row["answer"], "--limit", "1000")
    assert code == 0 and any(f"step 1  rollout {row['rollout_id']}  reward" in line for line in lines)


def test_without_the_option_no_profile_is_recorded(tiny_run):
    assert not (tiny_run / "profile.json").exists()


@pytest.mark.long_tier
def test_tiny_async_learns_as_well_as_tiny(tiny_run, penstock, tmp_path, read_lines):
    run = penstock("train", "tiny-async", "--run-dir", "run")
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    beside, alone = (json.loads((path / "summary.json").read_text()) for path in (tmp_path / "run", tiny_run))
    assert min(beside["eval_accuracy_after"], alone["eval_accuracy_after"]) >= 0.9
    assert beside["eval_accuracy_after"] >= alone["eval_accuracy_after"] - 0.05
    steps = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line]
    assert all(line["staleness/max"] <= 1 for line in steps)
    assert unexplained(read_lines(tmp_path / "run" / "metrics.jsonl")) == set()
    assert {"share/trainer_wait", "share/engine_idle", "tokens/wasted"} <= steps[-1].keys()


def test_two_runs_with_one_seed_give_identical_weights_and_metrics(tmp_path, read_lines):
    config = load_config("tiny", ["total_steps=4", "evaluator=null"])
    runs = [tmp_path / "a", tmp_path / "b"]
    for run in runs:
        config.build(run_dir=run).fit()
    first, second = (load_file(run / "hf" / "final" / "model.safetensors") for run in runs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    timeless = [
        [{k: v for k, v in line.items() if "time" not in k and "_s" not in k and "seconds" not in k} for line in lines]
        for lines in (read_lines(run / "metrics.jsonl") for run in runs)
    ]
    assert timeless[0] == timeless[1]


def test_a_resume_that_is_refused_late_leaves_the_files_of_the_run_as_they_are(tmp_path):
    run_dir = tmp_path / "run"
    load_config("tiny", ["total_steps=2", "evaluator=null"]).build(run_dir=run_dir).fit()
    resumed = load_config("tiny", ["total_steps=3", "evaluator=null"]).build(run_dir=run_dir, resume="newest")
    for weights in (run_dir / "checkpoints").glob("*2/*.safetensors"):
        weights.write_bytes(b"damaged after it was looked at")
    kept = ["summary.json", "config.json", "metrics.jsonl"]
    before = {name: (run_dir / name).read_bytes() for name in kept}
    with pytest.raises(CheckpointError):
        resumed.fit()
    assert {name: (run_dir / name).read_bytes() for name in kept} == before


@pytest.mark.long_tier
def test_ctrl_c_finishes_the_step_exports_the_weights_and_the_run_can_be_resumed(penstock, tmp_path, read_lines):
    small = ("--set", "evaluator=null", "--set", "train_batch_size=4")
    run = penstock("train", "tiny", "--run-dir", "run", *small, "--set", "total_steps=10000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("reward/mean") >= 2):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 0, output
    assert "Resume with: penstock train tiny --run-dir run --resume" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] and summary["steps"] >= 2
    assert (tmp_path / "run" / "hf" / "final" / "model.safetensors").exists()
    done = summary["steps"]
    resumed = penstock("train", "tiny", "--run-dir", "run", "--resume", "--set", f"total_steps={done + 2}")
    output, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, output
    steps = [line["step"] for line in read_lines(metrics) if "reward/mean" in line]
    assert steps == list(range(1, done + 3))


def test_a_judge_that_hangs_raises_or_answers_nan_never_yields_a_reward_and_the_run_goes_on(tmp_path, read_lines):
    """Words that begin with a, b or c meet a broken judge; the others are judged."""
    (tmp_path / "judge.py").write_text(
        "import time\n"
        "def judge(response, label, extra_info):\n"
        "    if label[-1] == 'a': time.sleep(60)\n"
        "    if label[-1] == 'b': raise ValueError('b is not for me')\n"
        "    if label[-1] == 'c': return float('nan')\n"
        "    return float(response == label)\n"
    )
    (tmp_path / "run.py").write_text(
        "from penstock.judger import NativeJudgerConfig\n"
        "from penstock.produce import FailurePolicyConfig\n"
        "from penstock.recipes.tiny import trainer as tiny\n"
        f"judger = NativeJudgerConfig(reward_handler='{tmp_path}/judge.py:judge', timeout_s=0.3, max_retries=0,\n"
        "    breaker_failures=10_000)\n"
        "trainer = (tiny.replace('evaluator', None).replace('total_steps', 3).replace('train_batch_size', 8)\n"
        "    .replace('manager.tasks.0.judger_config', judger)\n"
        "    .replace('manager.failures', FailurePolicyConfig(data_retries=0, breaker_share=0.95)))\n"
    )
    load_config(str(tmp_path / "run.py")).build(run_dir=tmp_path / "run").fit()
    letters = read_lines(tmp_path / "run" / "dead_letters.jsonl")
    assert {letter["reason"] for letter in letters} == {"unjudged"}
    assert {letter["messages"][0]["content"][0] for letter in letters} <= set("abc")
    trained = [
        rollout
        for step in (1, 2, 3)
        for rollout in read_lines(tmp_path / "run" / "trajectories" / f"step-{step:06d}.jsonl")
    ]
    assert len(trained) == 3 * 8 * 8
    assert not {rollout["ground_truth"][-1] for rollout in trained} & set("abc")
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(step.get("produce/reverse/discarded/unjudged", 0) for step in steps) == len(letters) > 0


def test_a_loss_that_is_not_finite_stops_the_run_after_three_tries_and_trains_nothing(tmp_path, monkeypatch):
    config = load_config("tiny", ["total_steps=2", "evaluator=null"])
    config = config.replace("train.loss", "custom_losses.nothing_is_a_number")
    (tmp_path / "custom_losses.py").write_text(
        "import torch\n"
        "from penstock.learn.losses import LossTerms\n"
        "def nothing_is_a_number(tokens, config):\n"
        "    many = len(tokens.logprobs) > 100\n"
        "    return LossTerms(tokens.logprobs * (torch.nan if many else 1.0), {})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    trainer = config.build(run_dir=tmp_path / "run")
    before = {name: tensor.clone() for name, tensor in trainer.parts.worker.weights.tensors()}
    with pytest.raises(StepRefused, match="train step 1 was refused 3 times in a row"):
        trainer.fit()
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.parts.worker.weights.tensors())
    trainer.parts.buffer.conservation().check()
    assert trainer.summary.steps == 0


def test_a_loss_that_raises_on_a_real_batch_ends_the_run_with_its_name_and_line_and_a_summary(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "fragile_run.py").write_text(
        "from penstock.recipes.tiny import trainer as tiny\n"
        "from penstock.learn.losses import policy_gradient\n"
        "def fragile(tokens, config):\n"
        "    if len(tokens.logprobs) > 10:\n"
        "        raise RuntimeError('too many tokens')\n"
        "    return policy_gradient(tokens)\n"
        "trainer = tiny.replace('evaluator', None).replace('train.loss', 'fragile_run.fragile')\n"
        "trainer = trainer.replace('train_batch_size', 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["train", "fragile_run.py"]) == 1
    said = "loss fragile_run.fragile raised RuntimeError: too many tokens"
    shown = capsys.readouterr().err
    assert said in shown and "fragile_run.py:5" in shown and "Traceback" not in shown
    summary = json.loads((tmp_path / "runs" / "fragile_run" / "summary.json").read_text())
    assert said in summary["error"] and summary["steps"] == 0


@pytest.mark.long_tier
def test_an_engine_that_is_killed_comes_back_and_the_run_goes_on(penstock, tmp_path, read_lines):
    settings = ("evaluator=null", "total_steps=100000", "train_batch_size=4")
    run = penstock("train", "tiny-async", "--run-dir", "run", *(f"--set={setting}" for setting in settings))
    metrics = tmp_path / "run" / "metrics.jsonl"

    def steps() -> int:
        return metrics.read_text().count("reward/mean") if metrics.exists() else 0

    def wait_for(step: int) -> None:
        deadline = time.monotonic() + 120
        while steps() < step:
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    wait_for(2)
    (engine,) = engines_of(run.pid)
    os.kill(engine, signal.SIGKILL)
    wait_for(steps() + 10)  # many more than were made ready before
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 0, output
    trained = [line["step"] for line in read_lines(metrics)]
    assert trained == list(range(1, len(trained) + 1))


@pytest.mark.long_tier
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_run_whose_output_cannot_be_written_ends_well_and_says_so_in_its_events(model_cache, tmp_path):
    command = [sys.executable, "-m", "penstock.cli", "train", "tiny", "--run-dir", "run", "--set", "evaluator=null"]
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [*command, "--set", "total_steps=1", "--set", "train_batch_size=2"],
            cwd=tmp_path,
            env=os.environ | {"PENSTOCK_HOME": str(model_cache.parent)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
        )
    assert run.returncode == 0, run.stderr
    events = [kept.event for kept in read_events(tmp_path / "run" / "events.jsonl")]
    [warned] = [event.text for event in events if isinstance(event, Warned) and event.source == "display"]
    assert "No space left" in warned
    assert (tmp_path / "run" / "hf" / "final").is_dir()
