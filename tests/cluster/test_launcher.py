"""Actors start where there is room, and nothing is left where there is none."""

from __future__ import annotations

import time

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from penstock.cluster.launcher import FREE, CPUActorLauncher
from penstock.errors import ConfigError
from penstock.resources import AcceleratorResourcesConfig, CPUResourcesConfig

MiB, GiB = 1 << 20, 1 << 30


def small(n: int, **others) -> CPUResourcesConfig:
    return CPUResourcesConfig(num_workers=n, num_cpus_per_worker=0.5, cpu_memory_per_worker=100 * MiB, **others)


def where(members) -> list[str]:
    table = ray._private.state.actors()
    return [table[member.handle._actor_id.hex()]["Address"]["NodeID"] for member in members]


def test_actors_are_spread_over_the_nodes_and_hold_what_they_ask_for(session):
    before = sum(node.free("CPU") for node in session.nodes())
    members = CPUActorLauncher(session).launch("loops", small(3))
    assert len(set(where(members))) == 3
    assert [member.name for member in members] == ["loops-0", "loops-1", "loops-2"]
    assert sum(node.free("CPU") for node in session.nodes()) == before - 1.5


def test_actors_stand_in_a_placement_group_of_the_caller_who_ends_it(session):
    group = placement_group([{"CPU": 1, "memory": 200 * MiB}] * 2, strategy="STRICT_PACK")
    assert group.wait(10)
    members = CPUActorLauncher(session).launch("loops", small(2), group=group)
    assert len(set(where(members))) == 1
    table = ray.util.placement_group_table()
    assert [entry["state"] for entry in table.values() if entry["state"] != "REMOVED"] == ["CREATED"]
    remove_placement_group(group)


def test_free_actors_hold_what_they_ask_for_too(session):
    before = sum(node.free("CPU") for node in session.nodes())
    CPUActorLauncher(session).launch("loops", small(2), group=FREE)
    assert sum(node.free("CPU") for node in session.nodes()) == before - 1.0


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        (CPUResourcesConfig(num_workers=2, num_cpus_per_worker=5), "a worker needs 5 CPU; the largest node"),
        (CPUResourcesConfig(num_workers=13, cpu_memory_per_worker=MiB), "lacks 1 CPU"),
        (CPUResourcesConfig(num_workers=1, cpu_memory_per_worker=5 * GiB), "needs 5.00 GiB of memory; the largest"),
        (CPUResourcesConfig(num_workers=8, num_cpus_per_worker=0.1, cpu_memory_per_worker=2 * GiB), "GiB of memory"),
        (small(4, pg_pack_strategy="STRICT_SPREAD"), "the cluster has 3 nodes"),
        (AcceleratorResourcesConfig(num_workers=1, accelerator="GPU"), "no node has a 'GPU'"),
    ],
    ids=["largest node", "CPU", "memory of a node", "memory", "nodes", "accelerator"],
)
def test_what_does_not_fit_is_refused_at_once_and_nothing_is_left(session, cluster, resources, said):
    launcher = CPUActorLauncher(session)
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        launcher.launch("loops", resources)
    assert said in str(caught.value)
    assert time.monotonic() - began < 10
    states = [group["state"] for group in ray.util.placement_group_table().values()]
    assert set(states) <= {"REMOVED"}


def test_an_actor_that_does_not_start_is_waited_for_no_longer_than_allowed_and_leaves_nothing(session):
    launcher = CPUActorLauncher(session, start_timeout_s=5)
    with pytest.raises(ConfigError, match="loops-0 did not start within 5 s"):
        launcher.launch("loops", small(1), python="/nowhere/python")
    assert [a["Name"] for a in ray._private.state.actors().values() if a["State"] == "ALIVE"] == []
