"""Waking those who wait for a change, without polling.

A waiter states a condition; it is looked at once and then after every change, until it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Something changed. Cheap when nobody waits."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._followers: list[Signal] = []

    def follow(self, other: Signal) -> None:
        """Be notified whenever `other` is."""
        other._followers.append(self)

    def notify(self) -> None:
        for follower in self._followers:
            follower.notify()
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()

    async def wait(self) -> None:
        """Until the next change. Waits without a deadline: callers bound it."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; it is looked at now and after each change."""
        while not condition():
            await self.wait()
