"""A virtual clock: asyncio code runs as it is, and time jumps to the next timer when nothing is ready.

    run_virtual(main())                     hours in milliseconds, always the same
    run_virtual(main(), seed=7)             the same, under one of many schedules that asyncio allows
    run_virtual(main(), deadline=3600.0)    refuses to go on beyond one virtual hour

What a seed changes: a task that could go on is sometimes held back for a few turns of the loop, as if it had awaited
`sleep(0)`, and timers fire up to a millisecond late. Plain callbacks keep their order, because asyncio promises it and
its own parts rely on it; the order in which tasks are resumed is promised to nobody.

A run that cannot go on ends at once with `Hang`, which lists the waiting tasks: nothing is ready and there is no
timer, the virtual deadline has passed, or the loop turns without time moving. There are no threads and no sockets on
this loop: what waits for one looks like a hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from penstock.errors import PenstockError

T = TypeVar("T")

MAX_TURNS_AT_ONCE = 100_000
"""Turns of the loop without time moving that are taken for a busy wait."""
MAX_LATENESS_S = 1e-3
HELD_BACK_SHARE = 0.25
MAX_TURNS_HELD_BACK = 3


class Hang(PenstockError):
    """The run cannot go on. Raised outside of all tasks, so that nothing can catch it by mistake."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(
        self,
        *,
        seed: int | str | None = None,
        deadline: float | None = None,
        after_turn: Callable[[], None] | None = None,
    ) -> None:
        """`after_turn` is called between any two turns of the loop; what it raises ends the run."""
        self._now = 0.0
        self._deadline = deadline
        self._after_turn = after_turn
        self._random = None if seed is None else random.Random(f"schedule {seed}")
        self._turns_at_once = 0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._random is not None:
            when += MAX_LATENESS_S * self._random.random()
        return super().call_at(when, callback, *args, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        rng = self._random
        if rng is None or rng.random() >= HELD_BACK_SHARE or not _is_task_step(callback):
            return super().call_soon(callback, *args, context=context)
        resume = functools.partial(super().call_soon, callback, *args, context=context)
        for _ in range(rng.randrange(MAX_TURNS_HELD_BACK)):
            resume = functools.partial(super().call_soon, resume)
        return super().call_soon(resume)

    def pass_time(self, seconds: float | None) -> None:
        """Nothing is left to do for so long; None: for ever. 0: there is more to do now."""
        if self._after_turn is not None:
            self._after_turn()
        if seconds is None:
            raise Hang(f"at {self._now:g} s nothing is ready and no timer is set. {self.waiting()}")
        if seconds > 0:
            self._now += seconds
            self._turns_at_once = 0
            if self._deadline is not None and self._now > self._deadline:
                raise Hang(f"the virtual deadline of {self._deadline:g} s has passed. {self.waiting()}")
        else:
            self._turns_at_once += 1
            if self._turns_at_once > MAX_TURNS_AT_ONCE:
                raise Hang(f"{MAX_TURNS_AT_ONCE} turns at {self._now:g} s: something is busy waiting. {self.waiting()}")

    def waiting(self) -> str:
        """Every task that is not done, and where it waits."""
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        return "Waiting: " + "; ".join(f"{task.get_name()} {_where(task)}" for task in tasks)


class _Jump(selectors.SelectSelector):
    """Where the event loop would sleep until the next timer, time moves instead."""

    def __init__(self, loop: VirtualClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.pass_time(timeout)
        return []


def run_virtual(
    main: Coroutine[Any, Any, T],
    *,
    seed: int | str | None = None,
    deadline: float | None = None,
    after_turn: Callable[[], None] | None = None,
) -> T:
    """What `main` returns or raises. Raises Hang when it cannot go on. Tasks left behind are cancelled."""
    loop = VirtualClockLoop(seed=seed, deadline=deadline, after_turn=after_turn)
    try:
        return loop.run_until_complete(main)
    finally:
        loop._after_turn = None
        try:
            _cancel_all(loop)
        finally:
            loop.close()


def _cancel_all(loop: VirtualClockLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop._deadline = None
    ending = loop.create_task(_ended(tasks), name="ending")
    for _ in range(2):
        loop._turns_at_once = 0
        # Stopped early when the end of `main` was still in line as the run failed.
        with contextlib.suppress(RuntimeError, Hang):
            loop.run_until_complete(ending)
            break


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    """A task that ignores its cancellation is left behind: the run ended because of something else."""
    if tasks:
        await asyncio.wait(tasks, timeout=60.0)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


def _is_task_step(callback: Callable[..., Any]) -> bool:
    return isinstance(getattr(callback, "__self__", None), asyncio.Task)


def _where(task: asyncio.Task[Any]) -> str:
    """file:line of the innermost frame that can be seen."""
    inner: Any = task.get_coro()
    frame = None
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None) or frame
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    return f"in {frame.f_code.co_qualname} at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else "in the dark"
