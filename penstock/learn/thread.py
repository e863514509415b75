"""A thread for work that blocks, which nobody leaves behind: a cancelled caller waits until it has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class OwnThread:
    """One thread, made by the first piece of work; what it runs never overlaps and comes in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], *, stop: Callable[[], None] | None = None) -> T:
        """The result of `work()`. Cancelled, it calls `stop` and waits for the end of the work before it raises."""
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if stop is not None:
                stop()
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            if not running.cancelled():
                # Retrieved: what the work raised while it was stopped is not news.
                running.exception()
            raise

    async def close(self) -> None:
        """Waits for what runs. Work that is handed in afterwards is refused."""
        await asyncio.to_thread(self._pool.shutdown)
