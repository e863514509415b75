"""What train ranks and engines of a run take of a cluster: one place where they take turns, else apart."""

from __future__ import annotations

from typing import Any

from penstock.cli.config_file import load_config
from penstock.cluster.site import worker_demands

GiB = 1 << 30
TRAIN = ["resources.train.num_workers=4", "resources.train.num_cpus_per_worker=2"]
ENGINES = [f"resources.engines.cpu_memory_per_worker={3 * GiB}", "engines.engine.process=true", "engines.num_engines=2"]


def demands(recipe: str, *settings: str, trains: bool = True) -> list[Any]:
    config: Any = load_config(recipe, [*TRAIN, *ENGINES, *settings])
    return worker_demands(config, trains=trains)


def test_in_a_disaggregated_run_ranks_and_engines_have_places_of_their_own() -> None:
    ranks, engines = demands("tiny-async")
    assert (ranks.num_workers, ranks.num_cpus, ranks.memory) == (4, 2.0, GiB)
    assert (engines.num_workers, engines.num_cpus, engines.memory) == (2, 1.0, 3 * GiB)


def test_in_a_colocated_run_a_rank_and_an_engine_share_a_place_and_its_accelerator() -> None:
    gpus = ["resources.train.accelerator=GPU", "resources.engines.accelerator=GPU"]
    (both,) = demands("tiny", *gpus)
    assert (both.num_workers, both.num_cpus, both.memory) == (4, 3.0, 4 * GiB)
    assert (both.accelerator, both.accelerators) == ("GPU", 1.0)


def test_an_evaluation_takes_engines_alone() -> None:
    (engines,) = demands("tiny", trains=False)
    assert (engines.name, engines.num_workers) == ("engines", 2)
