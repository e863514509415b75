"""Whole runs of `tiny-ray` on three nodes, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from cluster.conftest import leftovers
from cluster.ending import output_of

from penstock.cluster.session import connect
from penstock.events import ActorLost, ActorRecovered
from penstock.testing import check_ledger
from penstock.trainer.observers import read_events

LOOP = "agent_loop_config.num_ray_actors"
JUDGER = "judger_config.num_ray_actors"
STEPS = 12
SAME = [f"total_steps={STEPS}", "train_batch_size=4", "cpu_threads=1", "eval_interval=100", "evaluator.greedy=false"]
SAME += ["evaluator.eval_sample_num=40", "resources.train.num_workers=1"]


def with_actors(n: int) -> list[str]:
    """So many of each; with 0, everything in one process."""
    tasks = ("manager.tasks.0", "evaluator.tasks.0")
    engines = [f"engines.num_engines={n}"] if n else ["engines.num_engines=1", "engines.engine.process=false"]
    return [*(f"{task}.{field}={n}" for task in tasks for field in (LOOP, JUDGER)), *engines]


@pytest.fixture(scope="session")
def start(model_cache, tmp_path_factory):
    """Start `penstock` in a directory of its own; returns the process and the run's directory."""

    def start(*arguments: str, directory: Path | None = None) -> tuple[subprocess.Popen[str], Path]:
        directory = directory or tmp_path_factory.mktemp("run")
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", *arguments, "--run-dir", "run"],
            cwd=directory,
            env=os.environ | {"PENSTOCK_HOME": str(model_cache.parent), "PYTHONFAULTHANDLER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process, directory / "run"

    processes: list[subprocess.Popen[str]] = []
    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def finish(start):
    def finish(*arguments: str) -> Path:
        process, run = start("train", "tiny-ray", *arguments)
        output = output_of(process, run, 280)
        assert process.returncode == 0, output
        return run

    return finish


def settings(*values: str) -> list[str]:
    return [f"--set={value}" for value in values]


@pytest.fixture(scope="session")
def in_process(finish) -> Path:
    return finish(*settings(*SAME, *with_actors(0)))


@pytest.fixture(scope="session")
def on_one_actor_each(finish, cluster) -> Path:
    return finish("--address", cluster.address, *settings(*SAME, *with_actors(1)))


def weights(run: Path) -> bytes:
    return (run / "hf" / "final" / "model.safetensors").read_bytes()


def told(run: Path) -> list[tuple[str, str]]:
    """What was lost and what came back, in order."""
    events = [kept.event for kept in read_events(run / "events.jsonl")]
    return [(type(e).__name__, e.actor) for e in events if isinstance(e, ActorLost | ActorRecovered)]


def require_whole(run: Path, expected: int = STEPS) -> None:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "reward/mean" in line] == list(range(1, expected + 1))
    check_ledger(run).require_none()


def test_one_actor_of_each_gives_the_weights_of_the_run_in_one_process(in_process, on_one_actor_each, cluster):
    assert weights(on_one_actor_each) == weights(in_process)
    require_whole(on_one_actor_each)
    assert told(on_one_actor_each) == []
    assert leftovers(cluster) == []


@pytest.mark.soak_tier  # the run that loses a node has two of each and gives them as well
def test_two_actors_of_each_give_them_too(in_process, finish, cluster):
    run = finish("--address", cluster.address, *settings(*SAME, *with_actors(2)))
    assert weights(run) == weights(in_process)
    assert told(run) == []


def actors(cluster) -> dict[str, int]:
    """The processes of the actors that live, by name."""
    with connect(cluster.address):
        table = ray._private.state.actors().values()
        return {actor["Name"]: actor["Pid"] for actor in table if actor["State"] == "ALIVE"}


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("reward/mean") >= steps):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_does_not_fit_is_refused_before_anything_starts(start, cluster):
    too_large = settings("manager.tasks.0.agent_loop_config.num_cpus_per_actor=5")
    process, run = start("train", "tiny-ray", "--address", cluster.address, *too_large)
    output = output_of(process, run, 60)
    assert process.returncode == 2
    assert "agent loop SingleTurnAgentLoop: a worker needs 5 CPU; the largest node, " in output
    assert not run.exists()
    assert leftovers(cluster) == []


def test_actors_without_a_cluster_are_refused(start):
    process, run = start("train", "tiny-ray")
    output = output_of(process, run, 60)
    assert process.returncode == 2
    assert "manager.tasks.0.agent_loop_config.num_ray_actors is 2; that needs Ray: give --address local" in output


def test_an_evaluation_runs_on_the_cluster_too(start, cluster, in_process, tmp_path):
    model = str(in_process / "hf" / "final")
    small = settings("evaluator.greedy=false", "evaluator.eval_sample_num=40")
    command = ["eval", "tiny-ray", "--model", model, "--address", cluster.address, *small]
    process = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *command, "--out", str(tmp_path / "eval")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert json.loads((tmp_path / "eval" / "result.json").read_text())["metrics"]["eval/accuracy"] > 0.3
    assert leftovers(cluster) == []
