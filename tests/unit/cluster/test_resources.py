"""What fits and what does not, without a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.resources import CPUResourceManager, NodeResources
from penstock.errors import ConfigError
from penstock.resources import AcceleratorResourcesConfig, CPUResourcesConfig, Demand, actor_demands

GiB = 1 << 30


def node(name: str, cpus: float, memory: float = 64, **others: float) -> NodeResources:
    has = {"CPU": cpus, "memory": memory * GiB, "object_store_memory": 1e9, f"node:{name}": 1.0, **others}
    return NodeResources(name=name, resources=has, total=has)


def problems(nodes: list[NodeResources], *demands: Demand) -> list[str]:
    manager = CPUResourceManager(nodes)
    for demand in demands:
        manager.add(demand)
    return list(manager.problems())


def cpu(name: str, workers: int, cpus: float, gib: float = 1, strategy: str = "SPREAD") -> Demand:
    return CPUResourcesConfig(
        num_workers=workers,
        num_cpus_per_worker=cpus,
        cpu_memory_per_worker=int(gib * GiB),
        pg_pack_strategy=strategy,
    ).demand(name)


def gpu(name: str, workers: int, cpus: float = 1, kind: str = "GPU") -> Demand:
    return AcceleratorResourcesConfig(num_workers=workers, num_cpus_per_worker=cpus, accelerator=kind).demand(name)


def test_what_fits_has_no_problems():
    nodes = [node("a", 8), node("b", 4)]
    assert problems(nodes, cpu("loops", 4, 2), cpu("judgers", 4, 1)) == []
    assert problems(nodes) == []


@pytest.mark.parametrize(
    ("demands", "said"),
    [
        ([cpu("loops", 1, 9)], "loops: a worker needs 9 CPU; the largest node, a, has 8 CPU free of 8 CPU"),
        ([cpu("loops", 1, 1, 65)], "loops: a worker needs 65.00 GiB of memory; the largest node, a, has 64.00 GiB"),
        ([cpu("loops", 5, 2.5)], "the node with most room, "),
        ([cpu("loops", 3, 1, strategy="STRICT_SPREAD")], "its strategy is STRICT_SPREAD, and the cluster has 2 nodes"),
        ([gpu("ranks", 1)], "ranks: no node has a 'GPU'. The cluster has no accelerators."),
        ([cpu("loops", 6, 2), cpu("judgers", 1, 1)], "judgers: after 0 of its 1 workers and all before it, "),
    ],
)
def test_what_does_not_fit_is_named_with_the_node(demands, said):
    found = problems([node("a", 8), node("b", 4)], *demands)
    assert len([problem for problem in found if said in problem]) == 1, found
    with pytest.raises(ConfigError, match=said[:20]):
        manager = CPUResourceManager([node("a", 8), node("b", 4)])
        for demand in demands:
            manager.add(demand)
        manager.check()


def test_cpu_workers_have_what_the_workers_with_accelerators_leave():
    nodes = [node("a", 8, GPU=4)]
    assert problems(nodes, gpu("ranks", 4, cpus=1), cpu("loops", 4, 1)) == []
    (found,) = problems(nodes, gpu("ranks", 4, cpus=1), cpu("loops", 5, 1))
    assert found.startswith("loops: after 4 of its 5 workers and all before it, the next needs 1 CPU")
    assert "lacks 1 CPU. Asked for: ranks 4 x 1 CPU and 1.00 GiB of memory and 1 GPU, loops 5 x" in found
    (found,) = problems(nodes, gpu("ranks", 1, kind="GPUs"), cpu("loops", 1, 1))[:1]
    assert found == "ranks: no node has a 'GPUs'. Did you mean 'GPU'?"


def test_a_worker_that_no_node_has_room_for_at_once_is_told_from_one_that_is_too_large():
    (found,) = problems([node("a", 8, 1), node("b", 1, 64)], cpu("loops", 1, 4, 32))
    assert (
        found
        == "loops: no node has 4 CPU and 32.00 GiB of memory free at once; the closest, a, lacks 31.00 GiB of memory"
    )


def test_what_others_hold_is_not_free():
    busy = NodeResources(name="a", resources={"CPU": 1.0, "memory": GiB * 8.0}, total={"CPU": 8.0, "memory": GiB * 8.0})
    (found,) = problems([busy], cpu("loops", 1, 2))
    assert found == "loops: a worker needs 2 CPU; the largest node, a, has 1 CPU free of 8 CPU"


@given(
    cpus=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    workers=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.25, 0.5, 1.0, 2.0])), min_size=1, max_size=4),
)
def test_equal_sizes_fit_exactly_when_there_are_as_many_places(cpus, workers):
    """With one size for all there is no luck in the order."""
    size = workers[0][1]
    demands = [cpu(f"d{number}", count, size, 0.001) for number, (count, _) in enumerate(workers)]
    places = sum(int(n / size) for n in cpus)
    found = problems([node(f"n{number}", n) for number, n in enumerate(cpus)], *demands)
    assert (found == []) == (sum(count for count, _ in workers) <= places)


def test_equal_loops_and_judgers_have_their_actors_once():
    from penstock.recipes.tiny_ray import trainer

    demands = actor_demands(trainer)
    assert {demand.name: demand.num_workers for demand in demands.values()} == {
        "agent loop SingleTurnAgentLoop": 2,
        "judger penstock.judger.rewards.exact_match": 2,
    }
    other = trainer.replace("evaluator.tasks.0.judger_config.num_ray_actors", 1)
    assert len(actor_demands(other)) == 3
