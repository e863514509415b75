"""Pending tasks: the one owner of the groups being played.

A finished task is claimed exactly once, whether the producer or a pause sees it first. Until it is stored, a claimed
group still counts as pending, so nobody who looks can miss it. Finishing costs O(1), however many are pending.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Protocol

from penstock.produce.attempt import Attempt
from penstock.replay import Signal

CANCEL_TIMEOUT_S = 10.0
"""How long a cancelled task may take to end; one that ignores its cancellation is left behind."""

Flush = Callable[[], Awaitable[object]]


class Put(Protocol):
    """`ProduceContext.put_generated_group`."""

    async def __call__(self, played: Attempt, /, *, durable: bool) -> object: ...


class PendingTasks:
    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Attempt], Attempt] = {}
        self._finished: deque[asyncio.Task[Attempt]] = deque()
        self._storing = 0
        self._signal: Signal | None = None

    def __len__(self) -> int:
        """Groups that are played, finished but not claimed, or claimed but not yet stored."""
        return len(self._running) + len(self._finished) + self._storing

    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    def attempts(self) -> Iterator[Attempt]:
        """Those being played."""
        return iter(self._running.values())

    def schedule(self, attempt: Attempt, play: Coroutine[None, None, Attempt], signal: Signal) -> None:
        """Play a group in a task of its own; `signal` is notified when it ends."""
        self._signal = signal
        task = asyncio.get_running_loop().create_task(play, name=f"group {attempt.group[0].group_id}")
        self._running[task] = attempt
        task.add_done_callback(self._ended)

    async def store_finished(self, put: Put, flush: Flush) -> int:
        """Claim what finished and store it; returns how many. What a task raised passes.

        What was stored is flushed together: it shares one fsync, and counts as pending until it is durable.
        """
        stored = 0
        while self._finished:
            begun = 0
            try:
                while self._finished:
                    task = self._finished.popleft()
                    self._storing += 1
                    begun += 1
                    await put(task.result(), durable=False)
                await flush()
            finally:
                self._storing -= begun
                self._notify()
            stored += begun
        return stored

    async def drain(self, put: Put, flush: Flush) -> None:
        """Store everything as it finishes, until nothing is pending. Waits without a deadline: callers bound it.

        What storing raises is raised at the end, so that nothing is left running.
        """
        failure: Exception | None = None
        while len(self):
            try:
                stored = await self.store_finished(put, flush)
            except Exception as error:
                failure = failure or error
                continue
            if not stored and len(self):
                assert self._signal is not None
                await self._signal.wait()
        if failure is not None:
            raise failure

    async def cancel(self, put: Put, flush: Flush) -> int:
        """Cancel what still runs and store it as ABORTED with its prompt and record; returns how many.

        What storing raises is raised at the end, as in `drain`.
        """
        failure: Exception | None = None
        cancelled = list(self._running.items())
        for task, _ in cancelled:
            # Claimed first: from here on only this path stores it.
            del self._running[task]
            self._storing += 1
            task.cancel()
        try:
            if cancelled:
                await asyncio.wait([task for task, _ in cancelled], timeout=CANCEL_TIMEOUT_S)
            for task, attempt in cancelled:
                try:
                    finished = task.done() and not task.cancelled() and task.exception() is None
                    await put(task.result() if finished else attempt.interrupted(), durable=False)
                except Exception as error:
                    failure = failure or error
            await flush()
        except Exception as error:
            failure = failure or error
        finally:
            # Also when this is cut off: what counts as pending for ever would be waited for for ever.
            self._storing -= len(cancelled)
            self._notify()
        await self.drain(put, flush)
        if failure is not None:
            raise failure
        return len(cancelled)

    def abandon(self) -> None:
        """Cancel what still runs and store nothing: the run ends, and a restart gives these groups back."""
        # Claimed first, so that no later drain takes a cancelled task for a finished one.
        running, self._running = self._running, {}
        for task in running:
            task.cancel()

    def _ended(self, task: asyncio.Task[Attempt]) -> None:
        if self._running.pop(task, None) is not None:
            self._finished.append(task)
            self._notify()

    def _notify(self) -> None:
        if self._signal is not None:
            self._signal.notify()
