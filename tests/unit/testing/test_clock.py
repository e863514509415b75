from __future__ import annotations

import asyncio

import pytest

from penstock.testing import Hang, run_virtual


async def elapsed(seconds: float) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await asyncio.sleep(seconds)
    return loop.time() - started


async def order_of_ten() -> list[int]:
    order: list[int] = []

    async def note(i: int) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        order.append(i)

    await asyncio.gather(*(note(i) for i in range(10)))
    return order


def test_a_day_passes_at_once() -> None:
    assert run_virtual(elapsed(86400 * 3)) == pytest.approx(86400 * 3)


def test_without_a_seed_tasks_run_in_the_order_they_were_made() -> None:
    assert run_virtual(order_of_ten()) == list(range(10))


def test_a_seed_changes_the_order_and_gives_the_same_one_again() -> None:
    orders = [tuple(run_virtual(order_of_ten(), seed=seed)) for seed in range(20)]
    assert len(set(orders)) > 15
    assert orders == [tuple(run_virtual(order_of_ten(), seed=seed)) for seed in range(20)]


def test_a_seeded_timer_is_late_but_never_early() -> None:
    times = {run_virtual(elapsed(1.0), seed=seed) for seed in range(20)}
    assert len(times) > 10
    assert 1.0 <= min(times) <= max(times) < 1.01


def test_a_hang_names_who_waits_and_where() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.create_task(asyncio.Event().wait(), name="the lonely one")

    with pytest.raises(Hang, match=r"no timer is set.*the lonely one in Event\.wait at .*locks\.py:\d+"):
        run_virtual(wait_for_nobody())


def test_a_virtual_deadline_ends_the_run() -> None:
    with pytest.raises(Hang, match="deadline of 10 s"):
        run_virtual(elapsed(11), deadline=10)


def test_turning_without_end_at_one_instant_is_a_hang() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110 - that is the fault
            await asyncio.sleep(0)

    with pytest.raises(Hang, match="busy waiting"):
        run_virtual(spin())


def test_what_main_raises_is_raised() -> None:
    async def fail() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        run_virtual(fail())


def test_a_check_between_turns_ends_the_run_with_its_own_error() -> None:
    turns = 0

    def third_turn() -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            raise RuntimeError("the third turn")

    with pytest.raises(RuntimeError, match="third turn"):
        run_virtual(order_of_ten(), after_turn=third_turn)


def test_a_task_that_ignores_its_cancellation_does_not_hold_up_the_end() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    async def leave_it() -> str:
        leave_it.task = asyncio.create_task(stubborn())  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        return "done"

    assert run_virtual(leave_it()) == "done"
