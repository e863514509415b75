"""What any number of ranks saved, sharded or not, any other number goes on from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_program
from rank_program import Case, Made

from penstock.errors import CheckpointError
from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.learner import Learner
from penstock.rollout import Group

pytestmark = pytest.mark.long_tier

# Adam divides by the root of the second moment: where that is tiny, it makes much of a rounding.
NONE: dict[str, Any] = {"fused": False, "eps": 0.01}
FSDP2: dict[str, Any] = {"sharding": "fsdp2", "eps": 0.01}
KINDS = {"1": (1, NONE), "2": (2, NONE), "2 sharded": (2, FSDP2), "3 sharded": (3, FSDP2)}
SIZES = (2, 3)


@pytest.fixture(scope="module")
def batch(random_groups: Callable[..., list[Group]]) -> TrainBatch:
    return prepare_batch(random_groups(7, num_groups=3), train_step=1)


def _make(cases: dict[str, dict[str, Case]], model_dir: Path) -> dict[str, dict[str, list[Made]]]:
    """By kind of those who make them; ranks of one number in one set of processes."""
    made = {"1": {name: [rank_program.alone(case, model_dir)] for name, case in cases.get("1", {}).items()}}
    for size in SIZES:
        kinds = [kind for kind in cases if KINDS[kind][0] == size]
        flat = {f"{kind}/{name}": case for kind in kinds for name, case in cases[kind].items()}
        found = rank_program.together(size, flat, model_dir)
        for kind in kinds:
            made[kind] = {name: found[f"{kind}/{name}"] for name in cases[kind]}
    return made


@pytest.fixture(scope="module")
def saved(batch: TrainBatch, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One step, then a checkpoint, by each kind."""
    places = {kind: tmp_path_factory.mktemp("saved") for kind in KINDS}
    _make(
        {kind: {"save": Case(batch=batch, config=config, save=places[kind])} for kind, (_, config) in KINDS.items()},
        model_dir,
    )
    return places


@pytest.fixture(scope="module")
def resumed(saved: dict[str, Path], batch: TrainBatch, model_dir: Path) -> dict[str, dict[str, list[Made]]]:
    """Of each kind, one more step after the checkpoint of every kind."""
    return _make(
        {
            kind: {origin: Case(batch=batch, config=config, load=path) for origin, path in saved.items()}
            for kind, (_, config) in KINDS.items()
        },
        model_dir,
    )


@pytest.mark.parametrize(("origin", "kind"), list(itertools.product(KINDS, KINDS)))
def test_a_run_goes_on_with_another_number_of_ranks(
    resumed: dict[str, dict[str, list[Made]]], origin: str, kind: str
) -> None:
    """The second step has the moments of the first: without them it would go elsewhere."""
    expected, found = resumed["1"]["1"][0].weights, resumed[kind][origin][0].weights
    for key, weight in expected.items():
        np.testing.assert_allclose(found[key], weight, atol=2e-6, rtol=0, err_msg=key)


def test_the_same_number_of_ranks_goes_on_to_the_bit(
    resumed: dict[str, dict[str, list[Made]]], batch: TrainBatch, model_dir: Path, saved: dict[str, Path]
) -> None:
    again = _make(
        {kind: {"again": Case(batch=batch, config=KINDS[kind][1], load=saved[kind])} for kind in KINDS}, model_dir
    )
    for kind in KINDS:
        first, second = resumed[kind][kind][0].weights, again[kind]["again"][0].weights
        assert all(np.array_equal(first[key], second[key]) for key in first)


def test_what_one_rank_wrote_is_what_a_worker_writes(saved: dict[str, Path]) -> None:
    files = {kind: sorted(path.name for path in directory.iterdir()) for kind, directory in saved.items()}
    assert files["1"] == files["2"] == ["model.safetensors", "optimizer.safetensors"]
    assert files["2 sharded"] == [
        "model_0.safetensors", "model_1.safetensors", "optimizer_0.safetensors", "optimizer_1.safetensors",
    ]  # fmt: skip


def test_a_shard_that_is_missing_is_refused(saved: dict[str, Path], model_dir: Path, tmp_path: Path) -> None:
    for path in saved["2 sharded"].iterdir():
        if path.name != "model_1.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    learner = Learner(TrainWorkerConfig(), model_dir, total_steps=4, threads=1)
    with pytest.raises(CheckpointError, match="not of this model"):
        learner.load(tmp_path)
