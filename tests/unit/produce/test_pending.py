from __future__ import annotations

import asyncio
import time

import pytest

from penstock.produce.attempt import Attempt
from penstock.produce.pending import PendingTasks
from penstock.replay import Signal
from penstock.rollout import NO_TOKENS, Group, Prompt, RolloutState, Status
from penstock.testing import run_virtual


def attempt(name: str) -> Attempt:
    group = [RolloutState(prompt=Prompt(), group_id=name, rollout_id=f"{name}:{k}") for k in range(2)]
    return Attempt.begin(group, model_step=0, started_at=0.0)


class Shelf:
    """Where groups are stored; it takes its time until they are durable when asked to."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.stored: list[str] = []
        self.groups: dict[str, Group] = {}
        self.seconds = seconds

    async def put(self, stored: Attempt, /, *, durable: bool) -> None:
        assert not durable
        self.stored.append(stored.group[0].group_id)
        self.groups[stored.group[0].group_id] = stored.group

    async def flush(self) -> None:
        await asyncio.sleep(self.seconds)


async def play(played: Attempt, seconds: float) -> Attempt:
    await asyncio.sleep(seconds)
    for rollout in played.group:
        rollout.status = Status.COMPLETED
    return played


def schedule(pending: PendingTasks, signal: Signal, **seconds: float) -> None:
    for name, s in seconds.items():
        mine = attempt(name)
        pending.schedule(mine, play(mine, s), signal)


def test_a_finished_group_is_claimed_once_whoever_sees_it_first() -> None:
    async def main() -> list[str]:
        pending, shelf = PendingTasks(), Shelf(seconds=1.0)
        schedule(pending, Signal(), a=1, b=1, c=1)
        await asyncio.sleep(2)
        await asyncio.gather(
            pending.store_finished(shelf.put, shelf.flush),
            pending.drain(shelf.put, shelf.flush),
            pending.store_finished(shelf.put, shelf.flush),
        )
        return shelf.stored

    for seed in range(20):
        assert sorted(run_virtual(main(), seed=seed)) == ["a", "b", "c"]


def test_claimed_but_not_yet_stored_still_counts_as_pending() -> None:
    async def main() -> list[int]:
        pending, shelf = PendingTasks(), Shelf(seconds=10.0)
        schedule(pending, Signal(), a=1)
        await asyncio.sleep(2)
        counts = [len(pending)]
        storing = asyncio.create_task(pending.store_finished(shelf.put, shelf.flush))
        await asyncio.sleep(5)
        counts.append(len(pending))
        await storing
        return [*counts, len(pending)]

    assert run_virtual(main()) == [1, 1, 0]


def test_a_drain_stores_in_the_order_of_finishing_and_waits_for_all() -> None:
    async def main() -> tuple[list[str], float]:
        pending, shelf = PendingTasks(), Shelf()
        schedule(pending, Signal(), slow=9, quick=1, middle=5)
        await pending.drain(shelf.put, shelf.flush)
        return shelf.stored, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (["quick", "middle", "slow"], 9.0)


def test_a_drain_ends_when_another_path_stores_the_last_one() -> None:
    async def main() -> float:
        pending, shelf = PendingTasks(), Shelf(seconds=7.0)
        schedule(pending, Signal(), a=1)
        await asyncio.sleep(1)
        other = asyncio.create_task(pending.store_finished(shelf.put, shelf.flush))
        await asyncio.sleep(0)
        await pending.drain(shelf.put, shelf.flush)
        await other
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 8.0


def test_cancelling_stores_what_runs_as_aborted_and_what_finished_as_it_is() -> None:
    async def main() -> tuple[Shelf, int]:
        pending, shelf = PendingTasks(), Shelf()
        schedule(pending, Signal(), done=1, running=100)
        await asyncio.sleep(2)
        assert await pending.cancel(shelf.put, shelf.flush) == 1
        return shelf, len(pending)

    shelf, left = run_virtual(main())
    assert left == 0
    assert {name: stored[0].status for name, stored in shelf.groups.items()} == {
        "done": Status.COMPLETED,
        "running": Status.ABORTED,
    }


def test_cancelling_keeps_a_sibling_that_is_complete() -> None:
    async def main() -> list[Status]:
        pending, shelf = PendingTasks(), Shelf()
        half = attempt("half")
        half.group[0].status = Status.COMPLETED
        half.group[0].response = NO_TOKENS.append([1], [0.0], model_step=0)
        pending.schedule(half, play(half, 100), Signal())
        await asyncio.sleep(1)
        await pending.cancel(shelf.put, shelf.flush)
        assert len(shelf.groups["half"][0].response) == 1
        return [rollout.status for rollout in shelf.groups["half"]]

    assert run_virtual(main()) == [Status.COMPLETED, Status.ABORTED]


def test_a_task_that_ignores_its_cancellation_cannot_touch_what_was_stored() -> None:
    async def stubborn(mine: Attempt) -> Attempt:
        while mine.group[0].status is not Status.FAILED:
            try:
                await asyncio.sleep(1000)
                mine.group[0].status = Status.FAILED
            except asyncio.CancelledError:
                continue
        return mine

    async def main() -> tuple[Status, Status, float]:
        pending, shelf = PendingTasks(), Shelf()
        mine = attempt("mine")
        pending.schedule(mine, stubborn(mine), Signal())
        await asyncio.sleep(1)
        await pending.cancel(shelf.put, shelf.flush)
        waited = asyncio.get_running_loop().time()
        await asyncio.sleep(5000)
        return shelf.groups["mine"][0].status, mine.group[0].status, waited

    stored, later, waited = run_virtual(main())
    assert (stored, later) == (Status.ABORTED, Status.FAILED)
    assert waited < 20


def test_what_a_task_raises_is_raised_after_everything_else_was_stored() -> None:
    async def fail() -> Attempt:
        await asyncio.sleep(1)
        raise KeyError("from the task")

    async def main() -> list[str]:
        pending, shelf = PendingTasks(), Shelf()
        pending.schedule(attempt("bad"), fail(), Signal())
        schedule(pending, Signal(), good=5)
        with pytest.raises(KeyError, match="from the task"):
            await pending.drain(shelf.put, shelf.flush)
        assert len(pending) == 0
        return shelf.stored

    assert run_virtual(main()) == ["good"]


def test_what_is_abandoned_is_cancelled_and_stored_by_nobody() -> None:
    async def main() -> tuple[list[str], int, int]:
        pending, shelf = PendingTasks(), Shelf()
        schedule(pending, Signal(), running=100, done=1)
        await asyncio.sleep(2)
        pending.abandon()
        await pending.drain(shelf.put, shelf.flush)
        return shelf.stored, len(pending), len(asyncio.all_tasks())

    assert run_virtual(main()) == (["done"], 0, 1)


def test_cancelling_that_is_cut_off_leaves_nothing_to_wait_for() -> None:
    async def stubborn(played: Attempt) -> Attempt:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            await asyncio.sleep(8)
        return played

    async def main() -> int:
        pending, shelf = PendingTasks(), Shelf()
        one = attempt("a")
        pending.schedule(one, stubborn(one), Signal())
        await asyncio.sleep(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await pending.cancel(shelf.put, shelf.flush)
        await pending.drain(shelf.put, shelf.flush)
        return len(pending)

    assert run_virtual(main()) == 0


def test_a_store_that_fails_leaves_nothing_behind_when_the_rest_is_cancelled() -> None:
    class Full(Shelf):
        async def put(self, stored: Attempt, /, *, durable: bool) -> None:
            await super().put(stored, durable=durable)
            raise OSError("no space left on device")

    async def main() -> tuple[list[str], int]:
        pending, shelf = PendingTasks(), Full()
        schedule(pending, Signal(), a=100, b=100, c=1)
        await asyncio.sleep(2)
        with pytest.raises(OSError, match="no space"):
            await pending.cancel(shelf.put, shelf.flush)
        return sorted(shelf.stored), len(pending)

    assert run_virtual(main()) == (["a", "b", "c"], 0)


@pytest.mark.long_tier
def test_finishing_costs_the_same_with_ten_thousand_pending() -> None:
    async def cost_of_finishing(n: int) -> float:
        pending, signal, shelf = PendingTasks(), Signal(), Shelf()
        gates = [asyncio.Event() for _ in range(n)]

        async def gated(mine: Attempt, gate: asyncio.Event) -> Attempt:
            await gate.wait()
            return mine

        for i, gate in enumerate(gates):
            mine = attempt(str(i))
            pending.schedule(mine, gated(mine, gate), signal)
        await asyncio.sleep(0)
        started = time.perf_counter()
        for gate in gates[:200]:
            gate.set()
            await signal.wait()
            await pending.store_finished(shelf.put, shelf.flush)
        spent = time.perf_counter() - started
        for gate in gates:
            gate.set()
        await pending.drain(shelf.put, shelf.flush)
        assert len(shelf.stored) == n
        return spent

    few = min(asyncio.run(cost_of_finishing(200)) for _ in range(3))
    many = min(asyncio.run(cost_of_finishing(10_000)) for _ in range(3))
    # Fifty times as many pending: anything that looks at them all is far beyond this.
    assert many < 10 * few
