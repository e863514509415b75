"""Production: the tasks at work. Producing, pausing and draining them, the same colocated and disaggregated.

    produce(sizes, t)   all tasks at once, under the watchdog, each until its part of step t is there
    pause()             abort signal -> pause engines beside the drain; everything pending is stored, but for groups
                        that cannot be played again: those wait at the engines
    continue_with(m)    engines first, then the signal

It has one signal, `changed`: notified when a group finishes, moves in the buffer, or the abort signal or the manager's
status changes. Every wait is on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

from penstock.errors import DeadlineExceeded
from penstock.events import Nobody, Observer, StageBegan, StageEnded
from penstock.ports import Engine
from penstock.produce.context import ProduceContext
from penstock.produce.pause import PauseDeadlines, pause_engines
from penstock.produce.progress import ProduceProgress
from penstock.produce.strategy import ProduceBatchStatus
from penstock.produce.task import Task
from penstock.produce.watchdog import Watchdog
from penstock.replay import ReplayBuffer, Signal, calculate_seq_staleness
from penstock.rollout import Status

T = TypeVar("T")


class Production:
    def __init__(
        self,
        tasks: Mapping[str, Task],
        *,
        engine: Engine | None,
        buffer: ReplayBuffer,
        pause_deadlines: PauseDeadlines,
        stall_timeout_s: float,
        observer: Observer,
    ) -> None:
        """`engine` is the one it pauses and continues; None when somebody else does."""
        self.progress = ProduceProgress.build(tasks)
        self.model_step = 0
        """The weights the engines serve."""
        self.changed = Signal()
        self.changed.follow(buffer.changed)
        self.watchdog = Watchdog(
            tasks, buffer, self.progress, self.changed, stall_timeout_s=stall_timeout_s, observer=observer
        )
        self._tasks = tasks
        self._engine = engine
        # Who shares an engine that somebody else pauses has no pause to tell of.
        self._observer = observer if engine is not None else Nobody()
        self._buffer = buffer
        self._pause_deadlines = pause_deadlines
        self._stall_timeout_s = stall_timeout_s
        self._update_event = asyncio.Event()
        self._update_event.set()
        self._producing = False
        self._pause_time_s = 0.0

    async def produce(self, sizes: Mapping[str, int], train_step: int) -> ProduceBatchStatus:
        """Produce under the watchdog. From the call on, a pause waits for its end."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._producing = True
        try:
            return await self.watchdog.guard(self._produce_tasks(sizes, train_step))
        finally:
            self._producing = False
            self.progress.produce_time_s += loop.time() - started
            self.changed.notify()

    async def pause(self, *, ends: bool = False) -> None:
        """Abort signal first, then the engines, beside the drain of all tasks.

        Nothing is pending when it returns, but for groups that cannot be played again; if the run `ends`, nothing.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._observer.notice(StageBegan(stage="pause"))
        self._update_event.set()
        self.changed.notify()
        paused = asyncio.Event()
        pausing = asyncio.create_task(self._pause_engines(paused), name="pause engines")
        try:
            await self.until("strategies to stop", lambda: not self._producing)
            drains = [self._drain(task, ends) for task in self._tasks.values()]
            # Each to its end, also when one fails: nothing is left running.
            for drained in await asyncio.gather(*drains, return_exceptions=True):
                if isinstance(drained, BaseException):
                    raise drained
            # Nothing is pending any more; the engines still have to be stopped before weights change.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_deadlines.request_timeout_s):
                    await paused.wait()
        finally:
            pausing.cancel()
            await asyncio.gather(pausing, return_exceptions=True)
            seconds = loop.time() - started
            self._pause_time_s += seconds
            self._observer.notice(StageEnded(stage="pause", seconds=seconds))

    async def continue_with(self, model_step: int) -> None:
        """Go on with weights `model_step`, which the engines already serve."""
        for task in self._tasks.values():
            for attempt in task.strategy.attempts():
                # Left at work over the pause: from here on its tokens are of these weights.
                attempt.newest_step = max(attempt.newest_step, model_step)
        if self._engine is not None:
            await self._engine.continue_generation()
        self.model_step = model_step
        self._update_event.clear()
        self.changed.notify()

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Raises DeadlineExceeded with all counts when that takes too long."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self.changed.wait_until(condition)
        except TimeoutError:
            raise DeadlineExceeded(f"waited {self._stall_timeout_s:g} s for {what}. {self.watchdog.counts()}") from None

    def is_short(self, task: str) -> bool:
        """Fewer groups are consumed or ready than are due: some expired."""
        available = self.progress.consumed_samples[task] + self._buffer.count(task, Status.COMPLETED)
        return available < self.progress.target_samples[task]

    def is_too_old(self, task: Task, train_step: int) -> bool:
        """Whether the engines' weights may not serve a step: what they make would expire, or the strategy says so."""
        staleness = calculate_seq_staleness(self.model_step, train_step)
        return staleness >= task.runtime.stale_rule.stale_threshold or task.strategy.is_model_expired(
            train_step, self.model_step
        )

    def take_pause_time(self) -> float:
        """Seconds since this was last asked."""
        seconds, self._pause_time_s = self._pause_time_s, 0.0
        return seconds

    # Inside.

    async def _produce_tasks(self, sizes: Mapping[str, int], train_step: int) -> ProduceBatchStatus:
        """All tasks at once; ABORT beats EXPIRED beats NORMAL, tasks without a target take no part."""
        taking_part = {name: task for name, task in self._tasks.items() if sizes[name] > 0 or self.is_short(name)}
        # A task without a share of this step makes up for what expired of an earlier one.
        steps = {name: train_step if sizes[name] else self.progress.last_due_step[name] for name in taking_part}
        busy = set(taking_part)
        statuses = await _together(
            [
                self._produce_task(task, self._context(task, sizes[name], steps[name]), busy)
                for name, task in taking_part.items()
            ]
        )
        for status in (ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT, ProduceBatchStatus.EXPIRED_BATCH):
            if status in statuses:
                return status
        return ProduceBatchStatus.NORMAL

    async def _produce_task(self, task: Task, ctx: ProduceContext, busy: set[str]) -> ProduceBatchStatus:
        """One task's part of a step. While others are busy, it makes up for what it loses meanwhile by expiry."""
        while True:
            status = await task.strategy.produce_batch(ctx)
            busy.discard(task.name)
            self.changed.notify()
            left_with = min(ctx.available_count(), ctx.target_abs)
            if status is not ProduceBatchStatus.NORMAL:
                return status
            await self.changed.wait_until(
                lambda: not busy or ctx.should_abort() or ctx.available_count() < left_with  # noqa: B023 - waited for here
            )
            if not busy or ctx.should_abort():
                return status
            busy.add(task.name)

    async def _drain(self, task: Task, ends: bool) -> float:
        ctx = self._context(task, 0, self.progress.producer_future_step)
        return await (task.strategy.end_produce(ctx) if ends else task.strategy.pause_produce(ctx))

    async def _pause_engines(self, paused: asyncio.Event) -> None:
        if self._engine is None:
            paused.set()
            return
        await pause_engines(
            self._engine,
            self._pause_deadlines,
            none_protected=self._none_protected,
            changed=self.changed,
            paused=paused,
        )

    def _none_protected(self) -> bool:
        """No rollout is playing that was already interrupted as often as it may be."""
        return not any(attempt.protected for task in self._tasks.values() for attempt in task.strategy.attempts())

    def _context(self, task: Task, size: int, train_step: int) -> ProduceContext:
        return ProduceContext(
            task.runtime,
            progress=self.progress,
            task_batch_size=size,
            train_step=train_step,
            model_step=self.model_step,
            update_event=self._update_event,
            changed=self.changed,
        )


async def _together(coroutines: list[Coroutine[None, None, T]]) -> list[T]:
    """Run all at once. The first exception cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
