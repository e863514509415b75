"""Thousands of runs in virtual time, each drawn from its seed; see `penstock.testing.simulation`."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from penstock.replay import GroupState
from penstock.replay.lifecycle import ALLOWED
from penstock.testing import EngineFaults, EngineScript
from penstock.testing.simulation import SimulationError, draw_scenario, run_scenario, simulate, simulate_many

CHUNK = 50


@pytest.mark.sized
@pytest.mark.timeout(1200)
def test_thousands_of_runs_lose_skip_and_double_nothing_and_never_hang(size: Callable[[int, int], int]) -> None:
    seeds = size(100, 5000)
    chunks = [range(first, first + CHUNK) for first in range(0, seeds, CHUNK)]
    with concurrent.futures.ProcessPoolExecutor(
        max_workers=min(4, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        problems = [problem for found in pool.map(simulate_many, chunks) for problem in found]
    assert not problems, f"{len(problems)} of {seeds} seeds failed; the first:\n{problems[0]}"


@pytest.mark.parametrize("seed", [3, 14, 161, 974, 31264])
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    assert simulate(seed) == simulate(seed)


def test_a_seed_replays_exactly_in_another_process() -> None:
    command = [sys.executable, "-m", "penstock.testing.simulation", "161"]
    stories = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        stories.add(re.sub("at 0x[0-9a-f]+", "", ended.stdout))
    assert len(stories) == 1
    assert "leased -> trained" in stories.pop()


def test_the_seeds_reach_every_move_that_needs_no_restart() -> None:
    seen = {(event.transition.source, event.transition.target) for seed in range(40) for event in simulate(seed).events}
    possible = {(source, target) for source, targets in ALLOWED.items() for target in targets}
    without_restart = {
        (GroupState.TRAINED, GroupState.COMPLETED),
        (GroupState.MAX_TRIES, GroupState.DISCARDED),
        (GroupState.EXPIRED, GroupState.DISCARDED),
    }
    assert seen == possible - without_restart


def test_a_failing_seed_says_how_to_replay_it() -> None:
    scenario = draw_scenario(7)
    scenario.engine = EngineScript(faults=EngineFaults(fails=1.0))
    for task in scenario.tasks:
        task.failures = task.failures.replace("breaker_window", 5)
    with pytest.raises(SimulationError, match=r"seed 7: CircuitOpen[\s\S]*python -m penstock\.testing\.simulation 7"):
        run_scenario(scenario)
