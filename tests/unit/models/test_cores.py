"""How many threads, told by recordings: what a machine said of itself, and how long the steps took."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from penstock.models.cores import (
    HOLD_S,
    PATIENCE_S,
    STEPS,
    WINDOW_S,
    Reading,
    ThreadCount,
    available_cores,
    read_machine,
)
from penstock.models.threads import Team


class Machine:
    """Cores that others use as told; this process always uses what its threads can have."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.now = Reading(0.0, 0.0, 0.0)

    def passes(self, seconds: float, *, others: float, own: float, waited: float = 0.0) -> Reading:
        at, busy, used, waits = self.now
        self.now = Reading(
            at + seconds, busy + seconds * (others + own), used + seconds * own, waits + seconds * waited
        )
        return self.now


def follow(wanted: ThreadCount, machine: Machine, others: Iterable[float]) -> list[int]:
    """The numbers it has while others use so much, for three windows each; a step takes as long as the cores allow."""
    counts = []
    for used in others:
        for _ in range(3):
            own = min(float(wanted.count), machine.cores - used / 2)
            wanted.read(machine.passes(2 * WINDOW_S, others=used, own=own))
            for _ in range(STEPS):
                fits = wanted.count + used <= machine.cores + 0.5 or wanted.count == wanted.least
                wanted.took(1.0 / wanted.count if fits else 5.0, 64)
        counts.append(wanted.count)
    return counts


def test_one_busy_neighbour_costs_one_thread_and_gives_it_back_when_it_ends() -> None:
    wanted = ThreadCount(2, cores=2)
    assert follow(wanted, Machine(2), [0, 0, 0.67, 1, 1, 0.05, 0, 0]) == [2, 2, 1, 1, 1, 2, 2, 2]


def test_on_a_larger_machine_it_takes_what_the_others_leave() -> None:
    wanted = ThreadCount(16, cores=16)
    assert follow(wanted, Machine(16), [0, 6, 6, 12, 12, 1]) == [16, 10, 10, 4, 4, 15]


def test_a_neighbour_that_uses_little_costs_nothing() -> None:
    assert follow(ThreadCount(2, cores=2), Machine(2), [0.1, 0.3, 0.4, 0.2]) == [2, 2, 2, 2]


def test_its_share_stays_its_own_however_much_the_others_want() -> None:
    assert follow(ThreadCount(8, 4, cores=8), Machine(8), [0, 8, 8, 2, 2]) == [8, 4, 4, 6, 6]


def test_a_number_that_makes_steps_slower_is_taken_back_and_not_tried_again_at_once() -> None:
    wanted, machine = ThreadCount(2, cores=2), Machine(2)
    slower_alone = {1: 2.0, 2: 1.0}
    steps_alone = 0
    while machine.now.at < 2 * HOLD_S:
        wanted.read(machine.passes(2 * WINDOW_S, others=0.7, own=1.3))
        for _ in range(STEPS):
            steps_alone += wanted.count == 1
            wanted.took(slower_alone[wanted.count], 64)
    # However busy the machine looks, a step takes twice as long with one: that was tried, and once more when the time
    # was over.
    assert steps_alone == 2 * STEPS
    assert wanted.count == 2


def test_a_number_is_judged_by_steps_on_the_machine_as_it_is_not_as_it_was() -> None:
    wanted, machine = ThreadCount(2, cores=2), Machine(2)
    counts = []
    # Alone it is slower than two were, but not than two are. The neighbour came in the middle of the third window.
    for others, seconds in [(0.0, 1.0), (0.0, 1.0), (0.6, 1.0), (0.7, 5.0), *[(1.0, 2.0)] * STEPS]:
        wanted.took(seconds, 64)
        wanted.read(machine.passes(1.0, others=others, own=2 - others))
        counts.append(wanted.count)
    assert counts == [2, 2, 2, *[1] * (STEPS + 1)]


def test_one_thread_less_is_tried_where_something_waits_though_nobody_else_is_seen() -> None:
    wanted, machine = ThreadCount(4, cores=4), Machine(4)
    for _ in range(3):
        wanted.took(1.0, 64)
        wanted.read(machine.passes(2 * WINDOW_S, others=0.0, own=3.0, waited=0.8))
    assert wanted.count == 3


def test_whoever_cannot_be_timed_follows_what_others_use_at_once() -> None:
    wanted, machine = ThreadCount(4, 2, cores=4), Machine(4)
    counts = []
    for others in (0.0, 0.0, 1.0, 3.0, 0.0):
        wanted.read(machine.passes(2.0, others=others, own=1.0, waited=0.8))
        counts.append(wanted.count)
    assert counts == [4, 4, 3, 2, 4]


def test_steps_with_another_amount_of_work_are_not_compared() -> None:
    wanted, machine = ThreadCount(2, cores=2), Machine(2)
    for _ in range(3):
        wanted.took(1.0, 8)
        wanted.read(machine.passes(1.0, others=1.0, own=1.0))
    assert wanted.count == 1
    for _ in range(2 * STEPS):
        wanted.took(PATIENCE_S / 100, 64)
    assert wanted.count == 1 and wanted.trying
    for _ in range(STEPS):
        wanted.took(1.0, 8)
    assert wanted.count == 1 and not wanted.trying


def test_a_number_that_nothing_can_be_compared_with_is_taken_back() -> None:
    wanted, machine = ThreadCount(2, cores=2), Machine(2)
    for _ in range(3):
        wanted.took(1.0, 8)
        wanted.read(machine.passes(1.0, others=1.0, own=1.0))
    counts = []
    for _ in range(4):
        wanted.took(PATIENCE_S / 3, 64)
        counts.append(wanted.count)
    assert counts == [1, 1, 2, 2]


def test_passes_of_two_directions_are_not_compared_however_much_alike_their_sizes_are() -> None:
    wanted, machine = ThreadCount(2, cores=2), Machine(2)
    for _ in range(3):
        wanted.took(1.0, 64)
        wanted.read(machine.passes(1.0, others=1.0, own=1.0))
    for _ in range(STEPS):
        wanted.took(0.1, 64, "back")
    assert wanted.trying
    for _ in range(STEPS):
        wanted.took(2.0, 64)
    assert wanted.count == 2


def test_what_others_did_while_it_rested_says_nothing() -> None:
    """An engine beside a trainer of the same run: they take turns."""
    machine, before = Machine(2), torch.get_num_threads()
    wanted = ThreadCount(2, cores=2)
    team = Team(wanted, lambda: machine.now)
    counts = set()
    try:
        for _ in range(6):
            team.gather()
            machine.passes(WINDOW_S, others=0.0, own=2.0)
            team.stepped(WINDOW_S, 64)
            counts.add(wanted.count)
            team.rest()
            machine.passes(10.0, others=2.0, own=0.0, waited=0.5)
    finally:
        torch.set_num_threads(before)
    assert counts == {2}


def test_two_kinds_of_steps_that_take_turns_are_each_compared_with_their_own() -> None:
    """Layers of a train step, there and back: a number that is tried between them is judged all the same."""
    wanted, machine = ThreadCount(2, cores=2), Machine(2)
    seconds = {1: {64: 2.0, 128: 4.0}, 2: {64: 1.0, 128: 2.0}}
    counts = []
    for _ in range(4):
        wanted.read(machine.passes(2 * WINDOW_S, others=0.7, own=1.3))
        for rows in (64, 128, 64, 128):
            wanted.took(seconds[wanted.count][rows], rows)
            counts.append(wanted.count)
    assert 1 in counts
    assert wanted.count == 2


@pytest.mark.parametrize(
    ("given", "range_"),
    [
        ({"threads": 4}, (1, 4)),
        ({"threads": 2, "most": 4}, (2, 4)),
        ({"threads": 4, "fixed": True}, (4, 4)),
        ({"threads": 2, "most": 4, "fixed": True}, (2, 2)),
    ],
)
def test_whoever_is_deterministic_or_has_a_share_keeps_it(given: dict[str, int], range_: tuple[int, int]) -> None:
    found = ThreadCount.of(**given)
    assert (found.least, found.most) == range_


def test_looks_that_follow_each_other_too_soon_say_nothing() -> None:
    wanted, machine = ThreadCount(2, cores=2), Machine(2)
    wanted.read(machine.passes(1.0, others=1.0, own=1.0))
    wanted.read(machine.passes(WINDOW_S / 2, others=2.0, own=0.0))
    assert wanted.count == 2


def test_a_fixed_number_asks_nobody_and_stays() -> None:
    def unasked() -> Reading:
        raise AssertionError("the machine was looked at")

    before = torch.get_num_threads()
    wanted = ThreadCount(1, 1)
    team = Team(wanted, unasked)
    try:
        team.gather()
        for _ in range(10):
            team.stepped(1.0, 4)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_team_computes_with_what_is_wanted_now() -> None:
    machine, before = Machine(2), torch.get_num_threads()
    readings = iter([machine.passes(1.0, others=0.0, own=2.0), machine.passes(1.0, others=1.0, own=1.0)])
    team = Team(ThreadCount(2, cores=2), lambda: next(readings))
    try:
        team.gather()
        assert torch.get_num_threads() == 2
        team.gather()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_this_machine_can_be_read_and_one_that_says_nothing_is_left_alone(tmp_path: Path) -> None:
    assert available_cores() >= 1
    assert read_machine(tmp_path / "missing") is None
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9\n" + "".join(f"cpu{core} 100 0 50 1000 7 1 2 47 0 0\n" for core in range(1024)))
    pressure = tmp_path / "pressure"
    pressure.write_text("some avg10=1.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 total=0\n")
    found = read_machine(stat, pressure)
    assert found is not None
    assert found.busy == available_cores() * 2.0
    assert found.waited == 2.5
    without = read_machine(stat, tmp_path / "missing")
    assert without is not None and without.waited == 0.0
