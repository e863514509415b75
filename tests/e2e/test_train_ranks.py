"""Runs with two train ranks, from a configuration file on: they learn, go on, and survive the death of a rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.events import ActorLost, ActorRecovered, StepGivenBack
from penstock.trainer.observers import EVENTS_FILE, read_events

CONFIG = """
from penstock.recipes.tiny import trainer as tiny

trainer = (
    tiny.replace("resources.train.num_workers", 2)
    .replace("train.sharding", "{sharding}")
    .replace("train.loss", "{loss}")
    .replace("total_steps", {steps})
    .replace("checkpoint_interval", 2)
    .replace("cpu_threads", 2)
    .replace("train_batch_size", {batch})
)
if not {evaluate}:
    trainer = trainer.replace("evaluator", None)
"""
FULL_STEPS = 50
FATAL = "PENSTOCK_TEST_FATAL"
TESTS = Path(__file__).parents[1]


@pytest.fixture
def train(penstock, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv(FATAL, str(tmp_path / "order"))

    def run(name: str, *arguments: str, steps: int = 4, sharding: str = "none", loss: str = "ppo") -> Path:
        config = tmp_path / f"{name}.py"
        full = steps == FULL_STEPS
        filled = CONFIG.format(steps=steps, sharding=sharding, loss=loss, evaluate=full, batch=16 if full else 4)
        config.write_text(filled)
        run = penstock("train", str(config), "--run-dir", name, *arguments)
        output, _ = run.communicate(timeout=280)
        assert run.returncode == 0, output
        return tmp_path / name

    return run


def _final(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "hf" / "final" / "model.safetensors")


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _recoveries(run_dir: Path) -> list[tuple[str, str]]:
    told = (kept.event for kept in read_events(run_dir / EVENTS_FILE))
    return [
        (type(event).__name__, getattr(event, "actor", ""))
        for event in told
        if isinstance(event, ActorLost | ActorRecovered | StepGivenBack)
    ]


@pytest.mark.soak_tier
def test_tiny_learns_with_two_ranks(train):
    run_dir = train("ranks", steps=FULL_STEPS)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["eval_accuracy_after"] >= 0.9 > 0.6 > summary["eval_accuracy_before"]


@pytest.mark.soak_tier
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_rank_that_dies_in_a_step_leaves_the_weights_of_an_undisturbed_run(train, tmp_path, sharding):
    loss = "rank_program.ppo_that_may_die"
    undisturbed = train("undisturbed", sharding=sharding, loss=loss)
    assert _recoveries(undisturbed) == []
    (tmp_path / "order").write_text("1")
    disturbed = train("disturbed", sharding=sharding, loss=loss)
    assert not (tmp_path / "order").exists()
    assert _recoveries(disturbed) == [("ActorLost", "rank-1"), ("ActorRecovered", "rank-1"), ("StepGivenBack", "")]
    assert _same(_final(disturbed), _final(undisturbed))


@pytest.mark.soak_tier
def test_a_run_of_two_ranks_is_resumed_to_the_bit(train):
    whole = train("whole", sharding="fsdp2")
    train("parts", sharding="fsdp2", steps=2)
    parts = train("parts", "--resume", sharding="fsdp2")
    assert _same(_final(parts), _final(whole))
