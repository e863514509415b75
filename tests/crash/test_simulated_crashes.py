"""Crashes after ledger writes in virtual time; see `penstock.testing.crashes`."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os

import pytest

from penstock.produce import AsyncProduceStrategyConfig
from penstock.testing import EngineScript, ScriptedTask, uniform
from penstock.testing.crashes import Crash, CrashPlan, crash_many, draw_plan, simulate_crashes
from penstock.testing.script import constant
from penstock.testing.simulation import Scenario, draw_scenario

CHUNK = 25


def in_processes(function, chunks):
    with concurrent.futures.ProcessPoolExecutor(
        max_workers=min(4, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return list(pool.map(function, chunks))


@pytest.mark.sized
@pytest.mark.timeout(1200)
def test_thousands_of_crashes_after_ledger_writes_lose_skip_and_double_nothing(size):
    seeds, least = size(50, 1200), size(200, 5000)
    answers = in_processes(crash_many, [range(first, first + CHUNK) for first in range(0, seeds, CHUNK)])
    problems = [problem for _, found in answers for problem in found]
    assert not problems, f"{len(problems)} of {seeds} seeds failed; the first:\n{problems[0]}"
    assert sum(crashes for crashes, _ in answers) >= least


def fixed_scenario() -> Scenario:
    """Interrupted, stale and over-sampled groups, two tasks, refused steps: a little of everything."""
    return Scenario(
        seed=11,
        disaggregated=True,
        tasks=[
            ScriptedTask(
                name=name,
                strategy=AsyncProduceStrategyConfig(
                    over_sample_threshold=0.5,
                    enable_partial_rollout=partial,
                    max_staleness=1,
                    tail_batch_trigger_size=1,
                    tail_batch_max_tries=None if partial else 1,
                ),
            )
            for name, partial in (("partial", True), ("whole", False))
        ],
        batch_size=3,
        train_steps=4,
        sync_weights_interval=1,
        engine=EngineScript(slots=6, tokens_per_s=10.0, length=uniform(1, 60)),
        train_s=uniform(0, 3),
        refused=0.2,
        disturbed=0.0,
        flush_s=constant(0.0),
        eval_interval=10,
        eval_s=constant(0.0),
    )


def crash_at_each(writes: range) -> list[str]:
    """Crash at each of these writes, before and after its commit; and once more while the restart is being made."""
    problems = []
    for write in writes:
        for committed in (True, False):
            for again in (1, 2, 4):
                plan = CrashPlan((Crash(write, committed), Crash(again)), checkpoint_interval=2)
                try:
                    lives = simulate_crashes(fixed_scenario(), plan)
                    if lives.crashes == 0:
                        problems.append(f"write {write} was never reached")
                except Exception as error:
                    problems.append(str(error))
    return problems


@pytest.mark.sized
@pytest.mark.timeout(1200)
def test_a_crash_at_every_write_of_a_scenario_and_during_the_restart_loses_skips_and_doubles_nothing(size):
    # Without crashes and with one that never comes, the run is the same.
    whole = simulate_crashes(fixed_scenario(), CrashPlan((Crash(10**9),), checkpoint_interval=2))
    (writes,) = whole.writes
    moves = {(event.transition.source, event.transition.target) for event in whole.history.events}
    assert writes > 60 and len(moves) >= 9
    every = size(8, 1)
    chunks = [range(first, min(first + 8, writes + 1), every) for first in range(1, writes + 1, 8)]
    assert [problem for found in in_processes(crash_at_each, chunks) for problem in found] == []


def test_the_same_seed_crashes_the_same_way():
    first, second = (simulate_crashes(draw_scenario(5), draw_plan(5)) for _ in range(2))
    assert first.history == second.history
    assert first.writes == second.writes
    assert first.crashes >= 1
