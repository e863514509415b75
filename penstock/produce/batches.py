"""Batches: what becomes of one. It is taken for a train step, and then committed or given back."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import RunError
from penstock.produce.production import Production
from penstock.produce.result import ProduceBatchResult, Totals, task_result
from penstock.produce.strategy import ProduceBatchStatus
from penstock.produce.task import Task
from penstock.replay import ReplayBuffer
from penstock.rollout import Group


class Batches:
    """The same colocated and disaggregated: leasing a batch and counting it are one step."""

    def __init__(self, tasks: Mapping[str, Task], buffer: ReplayBuffer, production: Production) -> None:
        self._tasks = tasks
        self._buffer = buffer
        self._production = production
        self._leased: set[int] = set()
        """Train steps whose batch is handed out and neither committed nor returned."""
        self._totals = Totals()

    def require_none_of(self, train_step: int) -> None:
        if train_step in self._leased:
            raise RunError(
                f"the batch of train step {train_step} is already handed out; commit or return it before asking again"
            )

    def take(self, sizes: Mapping[str, int], train_step: int, status: ProduceBatchStatus) -> ProduceBatchResult:
        """Lease and count in one step, with no await between. Without a group the window stays as it is."""
        if not any(sizes.values()):
            return ProduceBatchResult(status=status)
        progress = self._production.progress
        batch = self._buffer.take_batch(sizes, train_step=train_step)
        self._leased.add(train_step)
        progress.mark_consumed(sizes)
        progress.finish_consume(train_step)
        windows, produce_time_s = progress.take_window()
        groups: list[Group] = [group for task_groups in batch.values() for group in task_groups]
        return ProduceBatchResult(
            groups=groups,
            status=status,
            tasks={
                name: task_result(
                    task.runtime,
                    batch.get(name, []),
                    windows[name],
                    self._totals.new_discards(self._buffer, name),
                    train_step,
                )
                for name, task in self._tasks.items()
            },
            pause_time_s=self._production.take_pause_time(),
            produce_time_s=produce_time_s,
            wasted_tokens=self._totals.new_waste(self._buffer),
        )

    async def commit(self, train_step: int) -> None:
        """The step was trained. Returns when that is durable."""
        self._buffer.commit(train_step)
        self._leased.discard(train_step)
        await self._buffer.flush()

    async def give_back(self, train_step: int) -> None:
        """The step was refused: its groups wait again, in their old places."""
        progress = self._production.progress
        progress.mark_returned(self._buffer.return_lease(train_step))
        self._leased.discard(train_step)
        progress.begin_consume(train_step)
        await self._buffer.flush()

    def resume(self) -> None:
        """What a restart found was reported before."""
        self._totals.begin(self._buffer, self._tasks)
