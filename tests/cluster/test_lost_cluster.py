"""A cluster that goes away as a whole: the run ends with a word, and goes on where there is another."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from cluster.conftest import NODE, TOKEN
from cluster.ending import output_of
from cluster.patient import begin, hold, hold_back
from cluster.test_runs import require_whole, settings, start, wait_for_steps, with_actors
from ray.cluster_utils import Cluster

from penstock.cluster.session import LOST_S, read_authentication_again
from penstock.environment import child_environment, environment_replaced

__all__ = ["begin", "hold", "start"]  # fixtures

STEPS = 200
SAME = [f"total_steps={STEPS}", "train_batch_size=4", "cpu_threads=1", "checkpoint_interval=5"]
SAME += ["resources.train.num_workers=1", "eval_interval=1000", "evaluator.greedy=false", "evaluator.eval_sample_num=8"]
ENDS_S = 60.0
"""After the loss is found."""


@pytest.fixture
def mortal():
    """One node, which the test ends."""
    directory = Path(tempfile.mkdtemp(prefix="psm-"))
    variables = child_environment() | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": "",
    }
    with environment_replaced(variables):
        read_authentication_again()
        nodes = Cluster(initialize_head=True, head_node_args=NODE | {"memory": 8 << 30, "include_dashboard": False})
        try:
            yield nodes
        finally:
            nodes.shutdown()
            shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize(
    ("ranks", "signals"), [*(pytest.param(1, signals, marks=pytest.mark.soak_tier) for signals in (0, 1)), (2, 1)]
)
def test_a_run_whose_cluster_is_gone_ends_with_a_word_and_can_be_resumed(begin, hold, mortal, ranks, signals):
    parts = [*with_actors(1), f"resources.train.num_workers={ranks}"]
    process, run = begin("--address", mortal.address, *settings(*SAME, *parts))
    wait_for_steps(process, run, 3)
    hold_back(process, hold)
    trained = (run / "metrics.jsonl").read_text().count("reward/mean")
    mortal.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
    output = output_of(process, run, LOST_S + ENDS_S)
    assert process.returncode == 1, output
    assert "the Ray cluster is gone" in output
    there = ["--address", "local", *settings(*SAME, *parts, f"total_steps={trained + 2}")]
    output = output_of(*begin(*there, "--resume", directory=run.parent), 200)
    require_whole(run, trained + 2)


@pytest.mark.soak_tier
def test_a_run_whose_cluster_goes_after_its_last_step_ends_as_well(begin, mortal):
    """What is left to do is to end what is there, and nothing is."""
    process, run = begin("--address", mortal.address, *settings(*SAME, *with_actors(1), "total_steps=3"))
    deadline = time.monotonic() + 200
    while not (run / "hf" / "final").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    mortal.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
    output = output_of(process, run, LOST_S + ENDS_S)
    assert process.returncode == 0, output
    require_whole(run, 3)
