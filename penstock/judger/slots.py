"""A bounded number of calls at a time, first come first served, on whichever event loop runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class NoSlot(Exception):
    """The wait for a free slot ended."""


class Slots:
    """A semaphore that may be used from one event loop after another; asyncio's own belongs to one for ever."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore = asyncio.Semaphore(size)

    @contextlib.asynccontextmanager
    async def take(self, until: float) -> AsyncIterator[None]:
        """Hold one slot. Waits for it until the loop's time `until`, then raises NoSlot."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._semaphore = loop, asyncio.Semaphore(self.size)
        semaphore = self._semaphore
        if semaphore.locked():
            try:
                async with asyncio.timeout_at(until):
                    await semaphore.acquire()
            except TimeoutError:
                raise NoSlot from None
        else:
            await semaphore.acquire()  # at once, so without the cost of a deadline
        try:
            yield
        finally:
            semaphore.release()
