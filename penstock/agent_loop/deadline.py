"""A user's code in tasks of their own, under deadlines that do not wait for the code to agree.

Agent code that swallows its cancellation is common: an `except BaseException`, a bare retry loop. Such a task is told
to end, given a moment, and then left behind; whoever waited goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

GRACE_S = 5.0
"""How long a cancelled task may take to end before it is left behind."""


class Clock:
    """Counts down for one task. It stands still while it is held: while a rollout waits for the engine."""

    __slots__ = (
        "_held",
        "_left",
        "_loop",
        "_plays",
        "_stage",
        "_task",
        "_timer",
        "expired_in",
        "left_behind",
        "seconds",
    )

    def __init__(self, stage: Callable[[], str]) -> None:
        """`stage` says what the task is doing."""
        self._stage = stage
        self._loop = asyncio.get_running_loop()
        self._plays: Plays | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left: float | None = None
        """Seconds, while it stands still."""
        self._held = 0
        self.seconds = 0.0
        """What it was last set to."""
        self.expired_in = ""
        """What the task was doing as time was up; empty while it is not."""
        self.left_behind = False
        """The task did not end when it was told to."""

    @property
    def expired(self) -> bool:
        return bool(self.expired_in)

    def watch(self, plays: Plays, task: asyncio.Task[None]) -> None:
        self._plays, self._task = plays, task

    def start(self, seconds: float) -> None:
        self.stop()
        self.seconds = seconds
        self._left = seconds
        if not self._held:
            self._run()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._left = None

    def end(self) -> None:
        """The task is done. Lets go of everything, so that nothing waits for the garbage collector."""
        self.stop()
        self._plays = self._task = None
        self._stage = str

    def hold(self) -> None:
        """May be nested. Once time is up it holds nothing: the moment that the task has left runs on."""
        self._held += 1
        if self._timer is not None and not self.expired:
            left = self._timer.when() - self._loop.time()
            self.stop()
            self._left = left

    def release(self) -> None:
        self._held -= 1
        if not self._held and self._left is not None:
            self._run()

    def _run(self) -> None:
        assert self._left is not None
        self._timer = self._loop.call_later(self._left, self._expire)
        self._left = None

    def _expire(self) -> None:
        self._timer = None
        self.expired_in = self._stage() or "nothing"
        if self._task is not None and self._plays is not None:
            self._task.cancel()
            self._timer = self._loop.call_later(GRACE_S, self._plays.leave, self._task)


class Plays:
    """Tasks that are waited for together, each under its clock."""

    def __init__(self, left_behind: Callable[[asyncio.Task[None]], None]) -> None:
        """`left_behind` is told of each task that did not end."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running: dict[asyncio.Task[None], Clock] = {}
        self._left_behind = left_behind

    def start(self, coroutine: Coroutine[Any, Any, None], clock: Clock, *, name: str) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        clock.watch(self, task)
        self._running[task] = clock
        task.add_done_callback(self._ended)

    async def wait(self) -> None:
        """Until each has ended or was left behind.

        The first exception ends the others and is raised as itself; so does the caller's cancellation.
        """
        if not self._running:
            return
        try:
            await self._over
        except BaseException:
            await self._stop()
            raise

    def leave(self, task: asyncio.Task[None]) -> None:
        """Go on without a task that was told to end."""
        clock = self._running.pop(task, None)
        if clock is None:
            return
        clock.left_behind = True
        self._left_behind(task)
        self._go_on()

    async def _stop(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=GRACE_S)
        for task in list(self._running):
            self.leave(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        clock = self._running.pop(task, None)
        if clock is None:
            return
        clock.end()
        if error is not None and not self._over.done():
            self._over.set_exception(error)
        self._go_on()

    def _go_on(self) -> None:
        if not self._running and not self._over.done():
            self._over.set_result(None)
