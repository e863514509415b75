"""AgentLoopManager: owns the tasks and orchestrates producer and consumer.

Colocated, one call per step, nothing runs in between:

    produce_batch(n, t, model_step)   continue engines -> refresh staleness -> all tasks produce -> pause, drain -> take

Disaggregated, two loops coupled only by the replay buffer's bound:

    produce_loop(n)      waits while paused, or while the model is too old and nothing is short;
                         otherwise makes step f due, produces it, goes on with f + 1
    get_batch(n, t)      waits for the groups of t; when the model is too old for f and newer weights exist,
                         returns empty so that the caller syncs and asks again
    pause_produce()      abort signal -> pause engines beside the drain; everything pending is stored
    continue_produce(m)  engines first, then the signal

Every wait here is on the buffer's signal and is bounded by the watchdog, which looks at the number of finished groups
and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

from penstock.errors import DeadlineExceeded, RunError
from penstock.ports import Engine
from penstock.produce.context import ProduceContext
from penstock.produce.pause import PauseDeadlines, pause_engines
from penstock.produce.progress import ProduceProgress
from penstock.produce.result import ProduceBatchResult, Totals, task_result
from penstock.produce.split import split_batch
from penstock.produce.strategy import ProduceBatchStatus
from penstock.produce.task import Task
from penstock.produce.watchdog import OnProgress, Watchdog
from penstock.replay import GroupState, ReplayBuffer, Restored
from penstock.rollout import Group, Status

T = TypeVar("T")

FAILED_DRAIN_S = 5.0
"""How long a failed or cancelled production may take to bring home what is pending."""


class AgentLoopManagerStatus(enum.StrEnum):
    NORMAL = "normal"
    UPDATE_WEIGHT_AND_ABORT = "update_weight_and_abort"
    EXPIRED_BATCH = "expired_batch"
    FINISH = "finish"


class AgentLoopManager:
    """`engine` is the one it pauses and continues; None when somebody else does (evaluation beside training)."""

    def __init__(
        self,
        tasks: list[Task],
        *,
        engine: Engine | None,
        buffer: ReplayBuffer,
        pause_deadlines: PauseDeadlines | None = None,
        stall_timeout_s: float = 900.0,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.needs_groups = True
        """Whether an empty colocated batch is an error. Evaluation counts what failed instead."""
        self.tasks = {task.name: task for task in tasks}
        self.buffer = buffer
        self.progress = ProduceProgress.build(self.tasks)
        self._engine = engine
        self._pause_deadlines = pause_deadlines or PauseDeadlines()
        self._stall_timeout_s = stall_timeout_s
        self._watchdog = Watchdog(self.tasks, buffer, stall_timeout_s=stall_timeout_s, on_progress=on_progress)
        self._model_step = 0
        self._status = AgentLoopManagerStatus.UPDATE_WEIGHT_AND_ABORT
        self._update_event = asyncio.Event()
        self._update_event.set()
        self._producing = False
        self._loop_running = False
        self._failure: BaseException | None = None
        self._pause_time_s = 0.0
        self._totals = Totals()

    @property
    def status(self) -> AgentLoopManagerStatus:
        return self._status

    @property
    def model_step(self) -> int:
        """The weights the engines serve."""
        return self._model_step

    def get_task_batch_sizes(self, batch_size: int, train_step: int) -> dict[str, int]:
        """Groups per task for a step: a pure function of its arguments. May be overridden."""
        return split_batch({task.name: task.weight for task in self.tasks.values()}, batch_size, train_step)

    # Colocated.

    async def produce_batch(self, batch_size: int, train_step: int, *, model_step: int) -> ProduceBatchResult:
        """Make and lease the batch of a step. Engines are paused and nothing is pending when it returns."""
        sizes = self._checked_sizes(batch_size, train_step)
        await self._continue(model_step)
        consumed = {name: self._consumed(name) for name in self.tasks}
        self.progress = ProduceProgress.build_local(self.tasks, sizes, train_step, consumed)
        self.buffer.refresh_staleness(train_step, self.tasks)
        try:
            status = await self._produce(sizes, train_step)
        except BaseException:
            # The run ends here. What does not come home now is given back by a restart.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAILED_DRAIN_S):
                    await self._pause()
            raise
        # Only when all tasks are done, so that a fast one never pauses a slow one.
        await self._pause()
        if status is ProduceBatchStatus.EXPIRED_BATCH:
            raise RunError(f"train step {train_step}: weights {model_step} are too old to produce for it")
        ready = {name: min(size, self.buffer.count(name, Status.COMPLETED)) for name, size in sizes.items()}
        if not any(ready.values()) and self.needs_groups:
            raise RunError(f"train step {train_step}: no group was produced. {self._watchdog.counts(self.progress)}")
        return self._take(ready, train_step, status)

    # Disaggregated: the producer's side.

    async def produce_loop(self, batch_size: int) -> None:
        """Produce until `shutdown`. Its failure also ends `get_batch`, as itself."""
        self._loop_running = True
        try:
            while True:
                await self.buffer.changed.wait_until(self._may_produce)
                if self._status is AgentLoopManagerStatus.FINISH:
                    return
                await self._produce_next(batch_size)
        except asyncio.CancelledError:
            self._failure = RunError("the produce loop was cancelled")
            raise
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._loop_running = False
            self.buffer.changed.notify()

    async def _produce_next(self, batch_size: int) -> None:
        """Produce the future step; or, when the model is too old for that, what expired of the steps before."""
        step = self.progress.producer_future_step
        sizes = self._checked_sizes(batch_size, step)
        if self._too_old(step, sizes):
            if not self._shortage_can_be_filled():
                self._set_status(AgentLoopManagerStatus.EXPIRED_BATCH)
                return
            step = self.progress.target_upto_future_step
            sizes = self._checked_sizes(batch_size, step)
        else:
            self.progress.ensure_target_upto(batch_size, step, self._checked_sizes)
        self._set_status(AgentLoopManagerStatus.NORMAL)
        status = await self._produce(sizes, step)
        if status is ProduceBatchStatus.NORMAL and step == self.progress.producer_future_step:
            self.progress.advance_future_step()
        elif status is ProduceBatchStatus.EXPIRED_BATCH and self._status is AgentLoopManagerStatus.NORMAL:
            self._set_status(AgentLoopManagerStatus.EXPIRED_BATCH)

    def _may_produce(self) -> bool:
        if self._status is AgentLoopManagerStatus.EXPIRED_BATCH:
            return self._shortage_can_be_filled()
        return self._status is not AgentLoopManagerStatus.UPDATE_WEIGHT_AND_ABORT

    def _too_old(self, step: int, sizes: Mapping[str, int]) -> bool:
        return any(
            task.strategy.is_model_expired(step, self._model_step) for task in self.tasks.values() if sizes[task.name]
        )

    def _shortage_can_be_filled(self) -> bool:
        """Groups that were due expired, and the weights may still serve the last step for which they are due."""
        return any(
            self._is_short(name)
            and not task.strategy.is_model_expired(self.progress.last_due_step[name], self._model_step)
            for name, task in self.tasks.items()
        )

    # Disaggregated: the consumer's side.

    async def get_batch(self, batch_size: int, train_step: int) -> ProduceBatchResult:
        """Lease the batch of a step as soon as it is ready.

        Empty with status EXPIRED_BATCH when the engines need newer weights first: sync, then ask again. Empty with
        NORMAL after shutdown. Raises the producer's own exception when the producer failed.
        """
        sizes = self._checked_sizes(batch_size, train_step)
        self.progress.begin_consume(train_step)
        self.buffer.refresh_staleness(train_step, self.tasks)
        expired = AgentLoopManagerStatus.EXPIRED_BATCH
        may_answer = self.buffer.changed.wait_until(
            lambda: (
                self._failure is not None
                or self._status is AgentLoopManagerStatus.FINISH
                or (self._status is expired and not self._worth_waiting(train_step, sizes))
                or (self._status is not expired and self.buffer.is_ready(sizes))
            )
        )
        # Watched here too: the producer may be paused, or not running at all.
        await self._watchdog.guard(may_answer, self.progress, report=False)
        if self._failure is not None:
            raise self._failure
        if self._status is AgentLoopManagerStatus.FINISH:
            return ProduceBatchResult()
        if self._status is expired and train_step - 1 > self._model_step:
            return ProduceBatchResult(status=ProduceBatchStatus.EXPIRED_BATCH)
        if not self.buffer.is_ready(sizes):
            raise RunError(
                f"train step {train_step}: the batch {sizes} is not ready, the weights {self._model_step} are too old "
                f"to produce for step {self.progress.producer_future_step}, and there are no newer ones. "
                f"{self._watchdog.counts(self.progress)}"
            )
        status = ProduceBatchStatus.EXPIRED_BATCH if self._status is expired else ProduceBatchStatus.NORMAL
        result = self._take(sizes, train_step, status)
        self.progress.finish_consume(train_step)
        self.buffer.refresh_staleness(train_step + 1, self.tasks)
        return result

    def _worth_waiting(self, train_step: int, sizes: Mapping[str, int]) -> bool:
        """Expired, without newer weights and not ready: the producer may still fill what expired."""
        return train_step - 1 <= self._model_step and not self.buffer.is_ready(sizes) and self._shortage_can_be_filled()

    async def pause_produce(self) -> None:
        """Stop producing and store everything pending; engines are paused when it returns."""
        if self._status is not AgentLoopManagerStatus.FINISH:
            self._status = AgentLoopManagerStatus.UPDATE_WEIGHT_AND_ABORT
        await self._pause()

    async def continue_produce(self, model_step: int) -> None:
        """Go on with weights `model_step`, which the engines already serve."""
        if self._status is AgentLoopManagerStatus.FINISH:
            return
        await self._continue(model_step)
        self._set_status(AgentLoopManagerStatus.NORMAL)

    async def shutdown(self) -> None:
        """End the produce loop and store everything pending. Nothing is left running."""
        self._set_status(AgentLoopManagerStatus.FINISH)
        try:
            await self._pause()
        finally:
            await self._bounded("the produce loop to end", lambda: not self._loop_running)
            for task in self.tasks.values():
                await task.runtime.agent_loop.close()

    # Both: what becomes of a batch.

    async def commit(self, train_step: int) -> None:
        """The step was trained. Returns when that is durable."""
        self.buffer.commit(train_step)
        await self.buffer.flush()

    async def return_batch(self, train_step: int) -> None:
        """The step was refused: its groups wait again, in their old places."""
        self.progress.mark_returned(self.buffer.return_lease(train_step))
        self.progress.begin_consume(train_step)
        await self.buffer.flush()

    def resume(self, checkpoint_step: int, restored: Restored) -> None:
        """Go on from what the buffer restored; then waits for `continue_produce`, or for the next colocated call."""
        for name, task in self.tasks.items():
            task.runtime.sampler.seek(restored.cursors.get(name, 0))
        self.progress.restart(checkpoint_step, restored.trained)
        self._model_step = checkpoint_step

    # Inside.

    async def _produce(self, sizes: Mapping[str, int], train_step: int) -> ProduceBatchStatus:
        """Produce under the watchdog. From the call on, a pause waits for its end."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._producing = True
        try:
            return await self._watchdog.guard(self._produce_tasks(sizes, train_step), self.progress)
        finally:
            self._producing = False
            self.progress.produce_time_s += loop.time() - started
            self.buffer.changed.notify()

    async def _produce_tasks(self, sizes: Mapping[str, int], train_step: int) -> ProduceBatchStatus:
        """All tasks at once; ABORT beats EXPIRED beats NORMAL, tasks without a target take no part."""
        taking_part = {name: task for name, task in self.tasks.items() if sizes[name] > 0 or self._is_short(name)}
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
            self.buffer.changed.notify()
            left_with = min(ctx.available_count(), ctx.target_abs)
            if status is not ProduceBatchStatus.NORMAL:
                return status
            await self.buffer.changed.wait_until(
                lambda: not busy or ctx.should_abort() or ctx.available_count() < left_with  # noqa: B023 - waited for here
            )
            if not busy or ctx.should_abort():
                return status
            busy.add(task.name)

    async def _pause(self) -> None:
        """Abort signal first, then the engines, beside the drain of all tasks."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._update_event.set()
        self.buffer.changed.notify()
        paused = asyncio.Event()
        pausing = asyncio.create_task(self._pause_engines(paused), name="pause engines")
        try:
            await self._bounded("strategies to stop", lambda: not self._producing)
            drains = [
                task.strategy.pause_produce(self._context(task, 0, self.progress.producer_future_step))
                for task in self.tasks.values()
            ]
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
            self._pause_time_s += loop.time() - started

    async def _pause_engines(self, paused: asyncio.Event) -> None:
        if self._engine is None:
            paused.set()
            return
        await pause_engines(
            self._engine,
            self._pause_deadlines,
            none_protected=self._none_protected,
            changed=self.buffer.changed,
            paused=paused,
        )

    def _none_protected(self) -> bool:
        """No rollout is playing that was already interrupted as often as it may be."""
        return not any(attempt.protected for task in self.tasks.values() for attempt in task.runtime.attempts.values())

    async def _bounded(self, what: str, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self.buffer.changed.wait_until(condition)
        except TimeoutError:
            raise DeadlineExceeded(
                f"waited {self._stall_timeout_s:g} s for {what}. {self._watchdog.counts(self.progress)}"
            ) from None

    async def _continue(self, model_step: int) -> None:
        if self._engine is not None:
            await self._engine.continue_generation()
        self._model_step = model_step
        self._update_event.clear()
        self.buffer.changed.notify()

    def _take(self, sizes: Mapping[str, int], train_step: int, status: ProduceBatchStatus) -> ProduceBatchResult:
        """Lease and count in one step, with no await between."""
        batch = self.buffer.take_batch(sizes, train_step=train_step)
        self.progress.mark_consumed(sizes)
        windows, produce_time_s = self.progress.take_window()
        pause_time_s, self._pause_time_s = self._pause_time_s, 0.0
        groups: list[Group] = [group for task_groups in batch.values() for group in task_groups]
        return ProduceBatchResult(
            groups=groups,
            status=status,
            tasks={
                name: task_result(
                    task.runtime,
                    batch.get(name, []),
                    windows[name],
                    self._totals.new_discards(self.buffer, name),
                    train_step,
                )
                for name, task in self.tasks.items()
            },
            pause_time_s=pause_time_s,
            produce_time_s=produce_time_s,
            wasted_tokens=self._totals.new_waste(self.buffer),
        )

    def _context(self, task: Task, size: int, train_step: int) -> ProduceContext:
        return ProduceContext(
            task.runtime,
            progress=self.progress,
            task_batch_size=size,
            train_step=train_step,
            model_step=self._model_step,
            update_event=self._update_event,
        )

    def _consumed(self, task: str) -> int:
        return self.buffer.state_count(task, GroupState.LEASED) + self.buffer.state_count(task, GroupState.TRAINED)

    def _is_short(self, task: str) -> bool:
        """Fewer groups are consumed or ready than are due: some expired."""
        available = self.progress.consumed_samples[task] + self.buffer.count(task, Status.COMPLETED)
        return available < self.progress.target_samples[task]

    def _checked_sizes(self, batch_size: int, train_step: int) -> dict[str, int]:
        """The split, checked because it may be overridden."""
        sizes = self.get_task_batch_sizes(batch_size, train_step)
        if set(sizes) != set(self.tasks) or sum(sizes.values()) != batch_size or min(sizes.values()) < 0:
            raise RunError(
                f"get_task_batch_sizes({batch_size}, {train_step}) answered {sizes}; it must name exactly the tasks "
                f"{sorted(self.tasks)}, sum to {batch_size} and have no negative size"
            )
        return sizes

    def _set_status(self, status: AgentLoopManagerStatus) -> None:
        self._status = status
        self.buffer.changed.notify()


async def _together(coroutines: list[Coroutine[None, None, T]]) -> list[T]:
    """Run all at once. The first exception cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
