"""Whole runs of `tiny-ray` as it is, with two of every part on three nodes: they learn, also when train ranks die."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import pytest
from cluster.conftest import leftovers
from cluster.ending import output_of
from cluster.hosted import kill
from cluster.test_runs import actors, require_whole, settings, start, wait_for_steps, weights

from penstock.events import ActorLost, ActorRecovered, StageBegan, StepGivenBack
from penstock.trainer.observers import read_events

__all__ = ["start"]  # a fixture

STEPS = 20
TESTS = Path(__file__).parents[1]
CONFIG = """
from penstock import CustomLossConfig
from penstock.recipes.tiny_ray import trainer as tiny

loss = CustomLossConfig(function="rank_program.ppo_that_may_die", arguments={{"order": "{order}"}})
trainer = tiny.replace("train.loss", loss)
"""
SAME = [f"total_steps={STEPS}", "cpu_threads=1", "evaluator=null"]


@pytest.fixture(scope="module")
def order(tmp_path_factory) -> Path:
    """The file that tells a rank to die in its next loss."""
    return tmp_path_factory.mktemp("order") / "rank"


@pytest.fixture(scope="module")
def begin(start, cluster, order, tmp_path_factory):
    config = tmp_path_factory.mktemp("config") / "tiny_that_may_die.py"
    config.write_text(CONFIG.format(order=order))

    def begin() -> tuple[subprocess.Popen[str], Path]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
            return start("train", str(config), "--address", cluster.address, *settings(*SAME))

    return begin


@pytest.fixture(scope="module")
def undisturbed(begin) -> Path:
    return finished(*begin())


def finished(process: subprocess.Popen[str], run: Path, timeout_s: float = 280.0) -> Path:
    output = output_of(process, run, timeout_s)
    assert process.returncode == 0, output
    return run


def recoveries(run: Path) -> list[str]:
    words = []
    for kept in read_events(run / "events.jsonl"):
        match kept.event:
            case ActorLost(actor=name):
                words.append(f"{name} lost")
            case ActorRecovered(actor=name):
                words.append(f"{name} recovered")
            case StepGivenBack():
                words.append("step given back")
    return words


def rewards(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["reward/mean"] for line in lines if "reward/mean" in line]


def test_tiny_ray_learns_with_two_of_every_part_on_three_nodes(undisturbed, cluster):
    require_whole(undisturbed, STEPS)
    assert recoveries(undisturbed) == []
    found = rewards(undisturbed)
    assert statistics.mean(found[-5:]) > statistics.mean(found[:5]) + 0.1, found
    assert leftovers(cluster) == []


def wait_for_production(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Until the answers of this step are being made, which takes a while: the ranks have nothing to do."""
    deadline = time.monotonic() + 200
    while not any(
        isinstance(kept.event, StageBegan) and kept.event.stage == "produce" and kept.event.train_step == step
        for kept in read_events(run / "events.jsonl")
    ):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_recoveries(process: subprocess.Popen[str], run: Path, number: int) -> None:
    deadline = time.monotonic() + 200
    while sum(word.endswith("recovered") for word in recoveries(run)) < number:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_rank_that_dies_in_a_step_or_idle_leaves_the_weights_of_the_undisturbed_run(
    undisturbed, begin, order, cluster
):
    process, run = begin()
    wait_for_steps(process, run, 3)
    order.write_text("1")
    wait_for_recoveries(process, run, 1)
    assert not order.exists(), "it was told to die in a step, and did"
    wait_for_steps(process, run, 6)
    pid = actors(cluster)["rank-0"]
    wait_for_production(process, run, len(rewards(run)) + 2)
    kill(pid)
    finished(process, run)
    assert recoveries(run) == [
        "rank-1 lost",
        "rank-1 recovered",
        "step given back",
        "rank-0 lost",
        "rank-0 recovered",
    ]
    require_whole(run, STEPS)
    assert weights(run) == weights(undisturbed)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["actors_lost"] == 2
    assert 0 < summary["effective_time_ratio"] < 1
    assert leftovers(cluster) == []
