"""Threads for work that blocks, which nobody leaves behind: a cancelled caller waits until it has ended."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class OwnThread:
    """One thread, made by the first piece of work; what it runs never overlaps and comes in the order of the calls."""

    def __init__(self, name: str, *, beside: bool = False) -> None:
        """`beside` what counts: it, and the threads that its work starts, have what others leave of the processor."""
        begin = _give_way if beside else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=begin)

    async def run(self, work: Callable[[], T], *, stop: Callable[[], None] | None = None) -> T:
        """The result of `work()`. Cancelled, it calls `stop` and waits for the end of the work before it raises."""
        return await result_of(self._pool.submit(work), stop)

    def begin(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Hand it in and do not wait: what is handed in later comes after it. See `result_of`."""
        return self._pool.submit(work)

    async def close(self) -> None:
        """Waits for what runs. Work that is handed in afterwards is refused."""
        await asyncio.to_thread(self._pool.shutdown)


class OwnLoop:
    """An event loop in a thread of its own: what belongs to it outlives the loops of those who use it.

    Child processes too, which the kernel ends with the thread that started them.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T], *, stop: Callable[[], None] | None = None) -> T:
        """As `OwnThread.run`."""
        return await result_of(self._submit(work), stop)

    def run_blocking(self, work: Coroutine[Any, Any, T]) -> T:
        return self._submit(work).result()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Work that nobody waits for, and whose failure is no news."""
        self._submit(work).add_done_callback(lambda done: done.cancelled() or done.exception())

    def call_soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """To be called when nothing runs there any more. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _give_way() -> None:
    """A tenth of the share of an ordinary thread where both want the same core."""
    if sys.platform == "linux":  # elsewhere a priority is that of the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


async def result_of(work: concurrent.futures.Future[T], stop: Callable[[], None] | None = None) -> T:
    """As `OwnThread.run` has it."""
    running = asyncio.wrap_future(work)
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
