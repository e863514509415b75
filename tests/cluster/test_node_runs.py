"""Whole runs of `tiny-ray` with train ranks that lose all at once: a node with ranks and engines, or the driver."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from cluster.conftest import NODE, leftovers
from cluster.patient import begin, hold, hold_back
from cluster.test_engine_runs import by_node, require_came_back, story, two_workers
from cluster.test_rank_runs import finished, rewards
from cluster.test_runs import require_whole, settings, start, wait_for_steps, weights

from penstock.events import RunBegan, RunEnded
from penstock.trainer.observers import read_events

__all__ = ["begin", "hold", "start", "two_workers"]  # fixtures

pytestmark = pytest.mark.timeout(600)
"""A node is missed after a while, and then everything starts twice."""

STEPS = 7
SAME = [f"total_steps={STEPS}", "train_batch_size=4", "cpu_threads=1", "evaluator=null", "checkpoint_interval=2"]
ONE_ENGINE = ["engines.num_engines=1"]
HERE = [f"manager.tasks.0.{part}.num_ray_actors=0" for part in ("agent_loop_config", "judger_config")]
APART = ["resources.train.num_cpus_per_worker=2.5"]
"""Two of them do not fit on one node."""


@pytest.fixture(scope="module")
def undisturbed(begin) -> Path:
    """Two ranks, on this machine and without Ray."""
    return finished(*begin(*settings(*SAME, *ONE_ENGINE, *HERE)))


def lose_node_of_engine_0(cluster, process, run: Path, hold: Path) -> set[str]:
    """In the middle of a step's production, when the ranks have nothing to do. Returns the actors that were there."""
    wait_for_steps(process, run, 3)
    hold_back(process, hold)
    (place, lost), *_ = [(node, names) for node, names in by_node(cluster).items() if "engine-0" in names]
    (node,) = [node for node in cluster.worker_nodes if node.node_id == place]
    cluster.remove_node(node, allow_graceful=False)
    return lost


def test_a_node_with_a_rank_and_all_engines_is_lost_and_comes_back_and_nothing_else_is(
    begin, undisturbed, hold, two_workers
):
    """The other rank kept the weights; those that the engine served are written again for the one that comes back."""
    cluster = two_workers
    process, run = begin("--address", cluster.address, *settings(*SAME, *ONE_ENGINE, *APART))
    lost = lose_node_of_engine_0(cluster, process, run, hold)
    ranks = {name for name in lost if name.startswith("rank-")}
    assert len(ranks) == 1
    cluster.add_node(**NODE | {"memory": 8 << 30})
    hold.unlink()
    finished(process, run)
    require_whole(run, STEPS)
    assert weights(run) == weights(undisturbed)
    words = story(run)
    assert sorted(word.removesuffix(" lost") for word in words if word.endswith(" lost")) == sorted(lost)
    assert sorted(word.removesuffix(" recovered") for word in words if word.endswith(" recovered")) == sorted(lost)
    require_came_back(words, "engine-0", lost)
    assert story(undisturbed) == ["engine-0 active"]
    assert leftovers(cluster) == []


@pytest.mark.soak_tier
def test_a_node_with_all_ranks_and_engines_is_lost_and_the_run_goes_on_by_itself_from_its_newest_checkpoint(
    begin, undisturbed, hold, two_workers
):
    """The other node has room, and nothing that was kept of the weights."""
    cluster = two_workers
    process, run = begin("--address", cluster.address, *settings(*SAME))
    lost = lose_node_of_engine_0(cluster, process, run, hold)
    trained = len(rewards(run))
    assert {"rank-0", "rank-1", "engine-0", "engine-1"} <= lost
    hold.unlink()
    finished(process, run, 500)
    require_whole(run, STEPS)
    assert weights(run) == weights(undisturbed)
    events = [kept.event for kept in read_events(run / "events.jsonl")]
    ended = [event.error for event in events if isinstance(event, RunEnded)]
    assert len(ended) == 2 and ended[0] is not None and ended[1] is None
    assert ended[0].startswith(("StateLost", "EngineUnavailable")), ended[0]
    assert [event.resumed_from for event in events if isinstance(event, RunBegan)] == [None, trained // 2 * 2]
    words = story(run)
    told = {word.removesuffix(" lost") for word in words if word.endswith(" lost")}
    ranks = {"rank-0", "rank-1"}
    # Of ranks that end together those are told whose end was known first: the others are ended then anyway.
    assert told - ranks == lost - ranks and told & ranks
    assert {word.removesuffix(" recovered") for word in words if word.endswith(" recovered")} <= lost - ranks
    assert leftovers(cluster) == []


def test_a_killed_driver_leaves_nothing_and_its_run_goes_on_from_the_ledger(begin, undisturbed, cluster):
    command = ["--address", cluster.address, *settings(*SAME, *ONE_ENGINE)]
    process, run = begin(*command)
    wait_for_steps(process, run, 3)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    finished(*begin(*command, "--resume", directory=run.parent))
    require_whole(run, STEPS)
    assert weights(run) == weights(undisturbed)
    assert {word.rpartition(" ")[2] for word in story(run)} == {"active"}, "nothing was lost but the driver"
    assert leftovers(cluster) == []
