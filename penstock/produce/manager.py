"""AgentLoopManager: owns the tasks and orchestrates producer and consumer.

Colocated, one call per step, nothing runs in between:

    produce_batch(n, t, model_step)   continue engines -> refresh staleness -> all tasks produce -> pause, drain -> take

Disaggregated, two loops coupled only by the replay buffer's bound:

    produce_loop(n)      waits while paused, or while the model is too old and nothing is short;
                         otherwise makes step f due, produces it, goes on with f + 1
    get_batch(n, t)      waits for the groups of t; when the model is too old for f and newer weights exist,
                         returns empty so that the caller syncs and asks again
    pause_produce()      abort signal -> pause engines beside the drain; everything that can be played again is stored
    continue_produce(m)  engines first, then the signal

Evaluation, each prompt once:

    ask(sizes, model_step)   the first prompts of every task from the beginning, whatever becomes of them

What both share is `production.py`, the tasks at work, and `batches.py`, what becomes of a batch. Every wait is on the
signal of the former and is bounded by the watchdog, which looks at the number of finished groups and nothing else.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Mapping
from typing import Any

from penstock.errors import RunError
from penstock.events import Nobody, Observer
from penstock.ports import Engine
from penstock.produce.batches import Batches
from penstock.produce.pause import PauseDeadlines
from penstock.produce.production import Production
from penstock.produce.progress import ProduceProgress
from penstock.produce.result import ProduceBatchResult
from penstock.produce.split import split_batch
from penstock.produce.strategy import ProduceBatchStatus
from penstock.produce.task import Task
from penstock.replay import DiscardReason, ReplayBuffer, Restored
from penstock.rollout import Status

logger = logging.getLogger(__name__)

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
        observer: Observer | None = None,
    ) -> None:
        self.tasks = {task.name: task for task in tasks}
        self.buffer = buffer
        self._production = Production(
            self.tasks,
            engine=engine,
            buffer=buffer,
            pause_deadlines=pause_deadlines or PauseDeadlines(),
            stall_timeout_s=stall_timeout_s,
            observer=observer or Nobody(),
        )
        self._batches = Batches(self.tasks, buffer, self._production)
        self._status = AgentLoopManagerStatus.UPDATE_WEIGHT_AND_ABORT
        self._loop_running = False
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def status(self) -> AgentLoopManagerStatus:
        return self._status

    @property
    def progress(self) -> ProduceProgress:
        return self._production.progress

    @property
    def model_step(self) -> int:
        """The weights the engines serve."""
        return self._production.model_step

    def get_task_batch_sizes(self, batch_size: int, train_step: int) -> dict[str, int]:
        """Groups per task for a step: a pure function of its arguments. May be overridden."""
        return split_batch({task.name: task.weight for task in self.tasks.values()}, batch_size, train_step)

    # Colocated.

    async def produce_batch(self, batch_size: int, train_step: int, *, model_step: int) -> ProduceBatchResult:
        """Make and lease the batch of a step. Engines are paused when it returns, and nothing is pending but groups
        that cannot be played again."""
        sizes = self._checked_sizes(batch_size, train_step)
        self._batches.require_none_of(train_step)
        result = await self._produce_and_take(sizes, train_step, model_step)
        if not result.groups:
            raise RunError(f"train step {train_step}: no group was produced. {self._counts()}")
        return result

    async def ask(self, sizes: Mapping[str, int], *, model_step: int) -> ProduceBatchResult:
        """Ask the first `sizes` prompts of each task once, from the beginning, of the weights the engines serve.

        For tasks with `AskOnceStrategy`. What failed is missing from the groups; there may be none. Nothing is held
        afterwards, and the same prompts have the same ids and random numbers every time.
        """
        train_step = model_step + 1
        for name, task in self.tasks.items():
            # What an earlier call that was cut off left behind, wherever it stood.
            self.buffer.discard_all(name, DiscardReason.CANCELLED)
            task.runtime.sampler.seek(0)
        asked = {name: sizes.get(name, 0) for name in self.tasks}
        result = await self._produce_and_take(asked, train_step, model_step, kept=False)
        if result.groups:
            await self.commit(train_step)
        return result

    async def _produce_and_take(
        self, sizes: Mapping[str, int], train_step: int, model_step: int, *, kept: bool = True
    ) -> ProduceBatchResult:
        """`kept`: what is pending when it is cut off is worth bringing home."""
        production = self._production
        await production.continue_with(model_step)
        self.progress.begin_local(sizes, train_step)
        self.buffer.refresh_staleness(train_step, self.tasks)
        try:
            status = await production.produce(sizes, train_step)
        except BaseException:
            if kept:
                # The run ends here. What does not come home now is given back by a restart.
                await self._drain_after_failure()
            else:
                self._abandon()
            raise
        # Only when all tasks are done, so that a fast one never pauses a slow one.
        await production.pause()
        if status is ProduceBatchStatus.EXPIRED_BATCH:
            raise RunError(f"train step {train_step}: weights {model_step} are too old to produce for it")
        ready = {name: min(size, self.buffer.count(name, Status.COMPLETED)) for name, size in sizes.items()}
        return self._batches.take(ready, train_step, status)

    async def _drain_after_failure(self) -> None:
        """Bring home what comes at once; an error here must not hide the first one."""
        try:
            async with asyncio.timeout(FAILED_DRAIN_S):
                await self._production.pause(ends=True)
        except Exception as error:
            logger.warning("after a failure, what was pending did not come home: %s: %s", type(error).__name__, error)

    # Disaggregated: the producer's side.

    async def produce_loop(self, batch_size: int) -> None:
        """Produce until `shutdown`. Its failure also ends `get_batch`, as itself."""
        self._loop_running = True
        try:
            while True:
                await self._production.changed.wait_until(self._may_produce)
                if self._status is AgentLoopManagerStatus.FINISH:
                    return
                await self._produce_next(batch_size)
        except asyncio.CancelledError:
            self._failure = RunError("the produce loop was cancelled")
            for task in self.tasks.values():
                task.strategy.abandon()
            raise
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._loop_running = False
            self._production.changed.notify()

    async def _produce_next(self, batch_size: int) -> None:
        """Produce the future step; or, when the model is too old for that, what expired of the steps before."""
        step = self.progress.producer_future_step
        sizes = self._checked_sizes(batch_size, step)
        if any(self._production.is_too_old(task, step) for task in self.tasks.values() if sizes[task.name]):
            if not self._shortage_can_be_filled():
                self._set_status(AgentLoopManagerStatus.EXPIRED_BATCH)
                return
            step = self.progress.target_upto_future_step
            sizes = self._checked_sizes(batch_size, step)
        else:
            self.progress.ensure_target_upto(batch_size, step, self._checked_sizes)
        self._set_status(AgentLoopManagerStatus.NORMAL)
        status = await self._production.produce(sizes, step)
        if status is ProduceBatchStatus.NORMAL and step == self.progress.producer_future_step:
            self.progress.advance_future_step()
        elif status is ProduceBatchStatus.EXPIRED_BATCH and self._status is AgentLoopManagerStatus.NORMAL:
            self._set_status(AgentLoopManagerStatus.EXPIRED_BATCH)

    def _may_produce(self) -> bool:
        if self._status is AgentLoopManagerStatus.EXPIRED_BATCH:
            return self._shortage_can_be_filled()
        return self._status is not AgentLoopManagerStatus.UPDATE_WEIGHT_AND_ABORT

    def _shortage_can_be_filled(self) -> bool:
        """Groups that were due expired, and the weights may still serve the last step for which they are due."""
        return any(
            self._production.is_short(name) and not self._production.is_too_old(task, self.progress.last_due_step[name])
            for name, task in self.tasks.items()
        )

    # Disaggregated: the consumer's side.

    async def get_batch(self, batch_size: int, train_step: int) -> ProduceBatchResult:
        """Lease the batch of a step as soon as it is ready.

        Empty with status EXPIRED_BATCH when the engines need newer weights first: sync, then ask again. Empty with
        NORMAL after shutdown. Raises the producer's own exception when the producer failed.
        """
        sizes = self._checked_sizes(batch_size, train_step)
        self._batches.require_none_of(train_step)
        self.progress.begin_consume(train_step)
        self.buffer.refresh_staleness(train_step, self.tasks)
        expired = AgentLoopManagerStatus.EXPIRED_BATCH
        may_answer = self.buffer.wait_ready(
            sizes,
            or_when=lambda: (
                self._failure is not None
                or self._status is AgentLoopManagerStatus.FINISH
                or (self._status is expired and not self._worth_waiting(train_step))
            ),
            changed=self._production.changed,
        )
        # Watched here too: the producer may be paused, or not running at all.
        await self._production.watchdog.guard(may_answer, report=False)
        if self._failure is not None:
            raise self._failure
        if self._status is AgentLoopManagerStatus.FINISH:
            return ProduceBatchResult()
        if self._status is expired and train_step - 1 > self.model_step:
            return ProduceBatchResult(status=ProduceBatchStatus.EXPIRED_BATCH)
        if not self.buffer.is_ready(sizes):
            raise RunError(
                f"train step {train_step}: the batch {sizes} is not ready, the weights {self.model_step} are too old "
                f"to produce for step {self.progress.producer_future_step}, and there are no newer ones. "
                f"{self._counts()}"
            )
        status = ProduceBatchStatus.EXPIRED_BATCH if self._status is expired else ProduceBatchStatus.NORMAL
        result = self._batches.take(sizes, train_step, status)
        self.buffer.refresh_staleness(train_step + 1, self.tasks)
        return result

    def _worth_waiting(self, train_step: int) -> bool:
        """Expired and without newer weights: the producer may still fill what expired."""
        return train_step - 1 <= self.model_step and self._shortage_can_be_filled()

    async def pause_produce(self) -> None:
        """Stop producing and store everything that can be played again; engines are paused when it returns."""
        if self._status is not AgentLoopManagerStatus.FINISH:
            self._status = AgentLoopManagerStatus.UPDATE_WEIGHT_AND_ABORT
        await self._production.pause()

    async def continue_produce(self, model_step: int) -> None:
        """Go on with weights `model_step`, which the engines already serve."""
        if self._status is AgentLoopManagerStatus.FINISH:
            return
        await self._production.continue_with(model_step)
        self._set_status(AgentLoopManagerStatus.NORMAL)

    async def shutdown(self) -> None:
        """End the produce loop, store everything pending, close. Nothing is left running.

        After a failure of the producer it does what it can and raises nothing: that failure is the one to see.
        """
        self._set_status(AgentLoopManagerStatus.FINISH)
        try:
            await self._production.pause(ends=True)
            await self._production.until("the produce loop to end", lambda: not self._loop_running)
        except Exception as error:
            if self._failure is None:
                raise
            logger.warning("shutting down after a failure: %s: %s", type(error).__name__, error)
        finally:
            await self.close()

    # Both: what becomes of a batch, and the end.

    async def commit(self, train_step: int) -> None:
        """The step was trained. Returns when that is durable."""
        await self._batches.commit(train_step)

    async def return_batch(self, train_step: int) -> None:
        """The step was refused: its groups wait again, in their old places."""
        await self._batches.give_back(train_step)

    def resume(self, checkpoint_step: int, restored: Restored, saved: Mapping[str, Any] | None = None) -> None:
        """Go on from what the buffer restored; then waits for `continue_produce`, or for the next colocated call.

        Of the `saved` progress only the windows count: the next batch's metrics have what was produced for it before
        the checkpoint. Everything else is what the ledger says.
        """
        for name, task in self.tasks.items():
            task.runtime.sampler.seek(restored.cursors.get(name, 0))
        if saved is not None and saved["target_samples"].keys() == self.tasks.keys():
            self.progress.load_state_dict(saved)
        # A task that the run has no more: what was trained of it is history.
        self.progress.restart(checkpoint_step, {name: restored.trained.get(name, 0) for name in self.tasks})
        self._production.model_step = checkpoint_step
        self._batches.resume()

    async def close(self) -> None:
        """Close the agent loops, each, also when one fails. A second call does nothing. Colocated, this is the end."""
        if self._closed:
            return
        self._closed = True
        self._abandon()  # what went on over the last pause; a restart gives it back
        loops = [task.runtime.agent_loop.close() for task in self.tasks.values()]
        for outcome in await asyncio.gather(*loops, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    # Inside.

    def _abandon(self) -> None:
        for task in self.tasks.values():
            task.strategy.abandon()

    def _counts(self) -> str:
        return self._production.watchdog.counts()

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
        self._production.changed.notify()
