"""Watching production: the deadline on finished groups, and the counts that explain a stalled or empty batch.

Heartbeats can come from a rollout that will never end; the only thing looked at is the number of groups that finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from penstock.errors import DeadlineExceeded
from penstock.events import Observer, TaskProgress
from penstock.produce.progress import ProduceProgress
from penstock.produce.task import Task
from penstock.replay import ReplayBuffer, Signal
from penstock.rollout import Status

T = TypeVar("T")

ASKING_S = 5.0
"""How long an agent loop may take to say what it waits for; it may be what hangs."""
ENDING_S = 10.0
"""How long a cancelled production may take to end; one that ignores it is left behind."""
MAX_NAMED = 8


class Watchdog:
    def __init__(
        self,
        tasks: Mapping[str, Task],
        buffer: ReplayBuffer,
        progress: ProduceProgress,
        changed: Signal,
        *,
        stall_timeout_s: float,
        observer: Observer,
    ) -> None:
        self._tasks = tasks
        self._buffer = buffer
        self._progress = progress
        self._changed = changed
        self._stall_timeout_s = stall_timeout_s
        self._observer = observer

    async def guard(self, production: Awaitable[T], *, report: bool = True) -> T:
        """What `production` returns. Raises DeadlineExceeded when no group finishes for too long."""
        producing = asyncio.ensure_future(production)
        watching = asyncio.ensure_future(self._watch(report))
        try:
            await asyncio.wait([producing, watching], return_when=asyncio.FIRST_COMPLETED)
            if not producing.done():
                await watching
            return await producing
        finally:
            producing.cancel()
            watching.cancel()
            await asyncio.wait([producing, watching], timeout=ENDING_S)
            for ended in (producing, watching):
                if ended.done() and not ended.cancelled():
                    ended.exception()

    def counts(self) -> str:
        """Per task: what is due, consumed and pending, and where its groups are."""
        lines = []
        for name, task in self._tasks.items():
            held = {state.value: n for state, n in self._buffer.conservation(name).states.items() if n}
            due, consumed = self._progress.target_samples[name], self._progress.consumed_samples[name]
            pending = task.strategy.pending_task_count()
            lines.append(f"task {name!r}: due {due}, consumed {consumed}, pending {pending}, groups {held}")
        return "; ".join(lines)

    async def _watch(self, report: bool) -> None:
        progress = self._progress
        while True:
            seen = progress.finished_groups
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await self._changed.wait_until(lambda: progress.finished_groups != seen)  # noqa: B023 - waited here
            except TimeoutError:
                raise DeadlineExceeded(
                    f"no group finished for {self._stall_timeout_s:g} s. {await self._oldest()} {self.counts()}"
                    f"{self._last_failures()}"
                ) from None
            if report:
                self._report()

    def _last_failures(self) -> str:
        failed = {task.runtime.failures.last_failure for task in self._tasks.values()} - {""}
        return f". The last failures: {'; '.join(sorted(failed))}" if failed else ""

    async def _oldest(self) -> str:
        """Names the group that has been playing longest, and what its rollouts wait for."""
        stages: dict[str, str] = {}
        for task in self._tasks.values():
            stages |= await _stages(task)
        attempts = [attempt for task in self._tasks.values() for attempt in task.strategy.attempts()]
        if not attempts:
            return f"Being played: {_named(stages)}." if stages else "No group is being played."
        oldest = min(attempts, key=lambda attempt: (attempt.started_at, attempt.group[0].group_id))
        seconds = asyncio.get_running_loop().time() - oldest.started_at
        waiting = {rollout_id: stages[rollout_id] for rollout_id in oldest.playing if stages.get(rollout_id)}
        return (
            f"The oldest of {len(attempts)} groups is {oldest.group[0].group_id}, playing for {seconds:.0f} s: "
            f"{_named(waiting) or 'between two attempts'}."
        )

    def _report(self) -> None:
        progress = self._progress
        for name, task in self._tasks.items():
            due = progress.target_samples[name] - progress.consumed_samples[name]
            self._observer.notice(
                TaskProgress(
                    task=name,
                    done=min(self._buffer.count(name, Status.COMPLETED), due),
                    due=due,
                    pending=task.strategy.pending_task_count(),
                    expired=self._buffer.count(name, Status.EXPIRED),
                    tokens=progress.windows[name].produced_tokens,
                )
            )


async def _stages(task: Task) -> dict[str, str]:
    try:
        async with asyncio.timeout(ASKING_S):
            return await task.runtime.agent_loop.stages()
    except Exception as error:
        return {f"the agent loop of {task.name}": f"{type(error).__name__}: {error}"}


def _named(stages: Mapping[str, str]) -> str:
    more = f" and {len(stages) - MAX_NAMED} more" if len(stages) > MAX_NAMED else ""
    return ", ".join(f"{rollout_id} in {stage}" for rollout_id, stage in list(stages.items())[:MAX_NAMED]) + more
