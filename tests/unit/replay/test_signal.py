from __future__ import annotations

import asyncio

from penstock.replay import Signal


def test_a_waiter_wakes_when_its_condition_holds_and_not_before() -> None:
    async def main() -> None:
        signal, seen = Signal(), []
        count = 0

        async def waiter() -> None:
            await signal.wait_until(lambda: count >= 2)
            seen.append(count)

        task = asyncio.create_task(waiter())
        for _ in range(2):
            await asyncio.sleep(0)
            assert seen == []
            count += 1
            signal.notify()
        await task
        assert seen == [2]

    asyncio.run(main())


def test_a_condition_that_holds_already_does_not_wait() -> None:
    asyncio.run(Signal().wait_until(lambda: True))


def test_a_cancelled_waiter_leaves_and_the_others_wake() -> None:
    async def main() -> None:
        signal = Signal()
        gone, stays = asyncio.create_task(signal.wait()), asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        gone.cancel()
        signal.notify()
        await stays
        assert gone.cancelled() or gone.cancelling()
        assert not signal._waiters

    asyncio.run(main())
