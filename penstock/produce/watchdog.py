"""Watching production: the deadline on finished groups, and the counts that explain a stalled or empty batch.

Heartbeats can come from a rollout that will never end; the only thing looked at is the number of groups that finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from penstock.errors import DeadlineExceeded
from penstock.produce.progress import ProduceProgress
from penstock.produce.task import Task
from penstock.replay import ReplayBuffer
from penstock.rollout import Status

T = TypeVar("T")

OnProgress = Callable[[str, int, int, dict[str, float]], None]
"""(task, groups done, groups due, details)"""


class Watchdog:
    def __init__(
        self, tasks: Mapping[str, Task], buffer: ReplayBuffer, *, stall_timeout_s: float, on_progress: OnProgress | None
    ) -> None:
        self._tasks = tasks
        self._buffer = buffer
        self._stall_timeout_s = stall_timeout_s
        self._on_progress = on_progress

    async def guard(self, production: Awaitable[T], progress: ProduceProgress, *, report: bool = True) -> T:
        """What `production` returns. Raises DeadlineExceeded when no group finishes for too long."""
        producing = asyncio.ensure_future(production)
        watching = asyncio.ensure_future(self._watch(progress, report))
        try:
            await asyncio.wait([producing, watching], return_when=asyncio.FIRST_COMPLETED)
            if not producing.done():
                await watching
            return await producing
        finally:
            producing.cancel()
            watching.cancel()
            await asyncio.gather(producing, watching, return_exceptions=True)

    def counts(self, progress: ProduceProgress) -> str:
        """Per task: what is due, consumed and pending, and where its groups are."""
        lines = []
        for name, task in self._tasks.items():
            held = {state.value: n for state, n in self._buffer.conservation(name).states.items() if n}
            due, consumed = progress.target_samples[name], progress.consumed_samples[name]
            pending = task.strategy.pending_task_count()
            lines.append(f"task {name!r}: due {due}, consumed {consumed}, pending {pending}, groups {held}")
        return "; ".join(lines)

    async def _watch(self, progress: ProduceProgress, report: bool) -> None:
        while True:
            seen = progress.finished_groups
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    while progress.finished_groups == seen:
                        await self._buffer.changed.wait()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"no group finished for {self._stall_timeout_s:g} s. {self._oldest()} {self.counts(progress)}"
                    f"{self._last_failures()}"
                ) from None
            if report:
                self._report(progress)

    def _last_failures(self) -> str:
        failed = {task.runtime.failures.last_failure for task in self._tasks.values()} - {""}
        return f". The last failures: {'; '.join(sorted(failed))}" if failed else ""

    def _oldest(self) -> str:
        """Names the group that has been playing longest, and what its rollouts wait for."""
        attempts = [
            (attempt.started_at, group_id, task)
            for task in self._tasks.values()
            for group_id, attempt in task.runtime.attempts.items()
        ]
        if not attempts:
            return "No group is being played."
        started_at, group_id, task = min(attempts, key=lambda attempt: attempt[:2])
        seconds = asyncio.get_running_loop().time() - started_at
        attempt = task.runtime.attempts[group_id]
        stages = {rollout_id: task.runtime.agent_loop.stage(rollout_id) for rollout_id in attempt.playing}
        waiting = ", ".join(f"{rollout_id} in {stage}" for rollout_id, stage in stages.items() if stage)
        doing = waiting or "between two attempts"
        return f"The oldest of {len(attempts)} groups is {group_id}, playing for {seconds:.0f} s: {doing}."

    def _report(self, progress: ProduceProgress) -> None:
        if self._on_progress is None:
            return
        for name, task in self._tasks.items():
            due = progress.target_samples[name] - progress.consumed_samples[name]
            details = {
                "pending": float(task.strategy.pending_task_count()),
                "expired": float(self._buffer.count(name, Status.EXPIRED)),
                "tokens": float(progress.windows[name].produced_tokens),
            }
            self._on_progress(name, min(self._buffer.count(name, Status.COMPLETED), due), due, details)
