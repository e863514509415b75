"""Whole runs of `tiny-ray` whose engines, controller and nodes are killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import ray
from cluster.conftest import NODE, TOKEN, leftovers
from cluster.ending import output_of
from cluster.hosted import kill
from cluster.patient import begin, hold, hold_back
from cluster.test_runs import SAME, actors, finish, in_process, require_whole, settings, start, wait_for_steps, weights
from cluster.test_runs import with_actors as all_with
from ray.cluster_utils import Cluster

from penstock.cluster.engines import CONTROLLER
from penstock.cluster.session import connect, read_authentication_again
from penstock.environment import child_environment, environment_replaced
from penstock.events import ActorLost, ActorRecovered, EngineChanged
from penstock.trainer.observers import read_events

__all__ = ["begin", "finish", "hold", "in_process", "start"]  # fixtures


def story(run: Path) -> list[str]:
    """What happened to actors and engines after the engines had started, until they were closed."""
    words = []
    for kept in read_events(run / "events.jsonl"):
        match kept.event:
            case EngineChanged(reason="closed"):
                pass
            case EngineChanged(engine=name, state=state):
                words.append(f"{name} {state}")
            case ActorLost(actor=name):
                words.append(f"{name} lost")
            case ActorRecovered(actor=name):
                words.append(f"{name} recovered")
    return words


def of(words: list[str], name: str) -> list[str]:
    return [word.removeprefix(f"{name} ") for word in words if word.startswith(f"{name} ")]


CAME_BACK = ["lost", "fenced", "recovering", "recovered", "active"]
"""What is told of an engine that was killed, in some order: two watch it."""
FOUND = ["active"]
"""What a new controller says of an engine that it can start, or that serves already."""


def require_came_back(words: list[str], name: str, lost: set[str]) -> None:
    """An engine of a lost node. Where its controller is lost too, the one that is back first decides what is told: a
    controller that meets an engine that is not there yet, or is going, fences it first.
    """
    told = of(words, name)
    assert told[0] == "active", "it starts"
    stories = [CAME_BACK]
    if CONTROLLER in lost:
        stories += [["lost", "recovered", *FOUND], [*FOUND, *CAME_BACK]]
    assert sorted(told[1:]) in [sorted(story) for story in stories], (name, told)


def wait_until_told(process: subprocess.Popen[str], run: Path, name: str, expected: list[str]) -> None:
    """An actor that is killed while another one is still away may be found before anybody missed it."""
    deadline = time.monotonic() + 120
    while sorted(told := of(story(run), name)) != sorted(expected):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, (name, told)
        time.sleep(0.05)


def test_a_killed_actor_of_every_kind_costs_time_and_nothing_else(in_process, begin, hold, cluster):
    """One of each: without its recovery the run could not end. Each is killed in the middle of a step, when what was
    told of those before is complete.
    """
    process, run = begin("--address", cluster.address, *settings(*SAME, *all_with(1)))
    killed = []
    told = {"engine-0": ["active"]}  # it starts
    for steps, kind in enumerate(("agent loop", "judger", "engine-0", CONTROLLER, "engine-0"), start=1):
        wait_for_steps(process, run, steps)
        hold_back(process, hold)
        for name, expected in told.items():
            wait_until_told(process, run, name, expected)
        ((name, pid),) = [(name, pid) for name, pid in actors(cluster).items() if name.startswith(kind)]
        kill(pid)
        hold.unlink()
        killed.append(name)
        told[name] = told.get(name, []) + (CAME_BACK if kind == "engine-0" else ["lost", "recovered"])
        if kind == CONTROLLER:
            told["engine-0"] = told["engine-0"] + FOUND
    output = output_of(process, run, 280)
    assert process.returncode == 0, output
    require_whole(run)
    # A rollout that is played again draws the same random numbers.
    assert weights(run) == weights(in_process)
    words = story(run)
    for name, expected in told.items():
        assert of(words, name)[0] == expected[0]
        assert sorted(of(words, name)) == sorted(expected)
    assert {word.rpartition(" ")[0] for word in words} == set(killed)
    recovered = [kept.event for kept in read_events(run / "events.jsonl") if isinstance(kept.event, ActorRecovered)]
    assert all(event.seconds > 0 for event in recovered)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["actors_lost"] == len(killed)
    assert summary["actor_seconds_lost"] == pytest.approx(sum(event.seconds for event in recovered))
    assert 0 < summary["effective_time_ratio"] < 1
    assert leftovers(cluster) == []


@pytest.fixture
def two_workers():
    """A head that takes no actors, and two nodes, each with room for everything."""
    directory = Path(tempfile.mkdtemp(prefix="psn-"))
    variables = child_environment() | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": "",
    }
    with environment_replaced(variables):
        read_authentication_again()
        nodes = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                nodes.add_node(**NODE | {"memory": 8 << 30})
            nodes.wait_for_nodes()
            yield nodes
        finally:
            nodes.shutdown()
            shutil.rmtree(directory, ignore_errors=True)


def by_node(cluster) -> dict[str, set[str]]:
    """The actors that live, by the id of their node."""
    with connect(cluster.address):
        found: dict[str, set[str]] = {}
        for actor in ray._private.state.actors().values():
            if actor["State"] == "ALIVE":
                found.setdefault(actor["Address"]["NodeID"], set()).add(actor["Name"])
        return found


def test_a_node_that_is_lost_with_all_on_it_costs_time_and_nothing_else(in_process, begin, hold, two_workers):
    """Two of each, on two nodes; the other one has room for what is lost."""
    process, run = begin("--address", two_workers.address, *settings(*SAME, *all_with(2)))
    wait_for_steps(process, run, 3)
    hold_back(process, hold)
    places = by_node(two_workers)
    node = max(two_workers.worker_nodes, key=lambda node: len(places.get(node.node_id, ())))
    lost = places[node.node_id]
    assert any(name.startswith("agent loop") for name in lost) and any(name.startswith("judger") for name in lost)
    assert any(name.startswith("engine-") for name in lost)
    two_workers.remove_node(node, allow_graceful=False)
    hold.unlink()
    output = output_of(process, run, 400)
    assert process.returncode == 0, output
    require_whole(run)
    assert weights(run) == weights(in_process)
    words = story(run)
    assert {word.removesuffix(" lost") for word in words if word.endswith(" lost")} == lost
    assert {word.removesuffix(" recovered") for word in words if word.endswith(" recovered")} == lost
    for name in ("engine-0", "engine-1"):
        if name in lost:
            require_came_back(words, name, lost)
        else:
            assert of(words, name) == ["active", *(FOUND if CONTROLLER in lost else [])]
    assert leftovers(two_workers) == []
