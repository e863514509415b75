"""ProduceBatchResult: the groups of a train step, and what it took to make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from penstock.produce.context import TaskRuntime
from penstock.produce.progress import Window
from penstock.produce.strategy import ProduceBatchStatus
from penstock.replay import ReplayBuffer, group_staleness
from penstock.rollout import Group


class TaskResult(msgspec.Struct, kw_only=True):
    """One task's part of a batch. Counts of rollouts, tokens and discards are those since the last batch."""

    groups: int = 0
    group_time_count: int = 0
    group_time_mean_s: float = 0.0
    group_time_p50_s: float = 0.0
    group_time_p99_s: float = 0.0
    group_time_p99_to_p50: float = 0.0
    leftover: dict[str, int] = {}
    """Groups that wait after the batch was taken, by status."""
    raw_reward_sum: float = 0.0
    raw_reward_count: int = 0
    produced_rollouts: int = 0
    produced_tokens: int = 0
    failed: int = 0
    filtered: int = 0
    discarded: dict[str, int] = {}
    staleness: dict[int, int] = {}
    """Groups of the batch by staleness."""


class ProduceBatchResult(msgspec.Struct, kw_only=True):
    groups: list[Group] = []
    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL
    tasks: dict[str, TaskResult] = {}
    pause_time_s: float = 0.0
    produce_time_s: float = 0.0
    wasted_tokens: dict[str, int] = {}
    """Since the last batch, by reason."""

    def metrics(self) -> dict[str, float]:
        """Flat names for trackers."""
        tasks = list(self.tasks.values())
        rewards = sum(task.raw_reward_count for task in tasks)
        flat: dict[str, float] = {
            "produce/groups": float(len(self.groups)),
            "produce/rollouts": float(sum(task.produced_rollouts for task in tasks)),
            "produce/failed": float(sum(task.failed for task in tasks)),
            "produce/filtered": float(sum(task.filtered for task in tasks)),
            "produce/pause_s": self.pause_time_s,
            "tokens/generated": float(sum(task.produced_tokens for task in tasks)),
            "tokens/wasted": float(sum(self.wasted_tokens.values())),
        }
        if self.produce_time_s:
            flat["tokens/generated_per_s"] = flat["tokens/generated"] / self.produce_time_s
        if rewards:
            flat["reward/raw_mean"] = sum(task.raw_reward_sum for task in tasks) / rewards
        flat.update({f"tokens/wasted/{reason}": float(n) for reason, n in self.wasted_tokens.items()})
        for name, task in self.tasks.items():
            flat.update(
                {
                    f"produce/{name}/group_time_mean_s": task.group_time_mean_s,
                    f"produce/{name}/group_time_p50_s": task.group_time_p50_s,
                    f"produce/{name}/group_time_p99_s": task.group_time_p99_s,
                    f"produce/{name}/group_time_p99_to_p50": task.group_time_p99_to_p50,
                }
            )
            flat.update({f"produce/{name}/leftover/{status}": float(n) for status, n in task.leftover.items()})
            flat.update({f"produce/{name}/discarded/{reason}": float(n) for reason, n in task.discarded.items()})
        return flat


class Totals:
    """What was already reported of the buffer's running totals, so that a result shows only what is new."""

    def __init__(self) -> None:
        self._discarded: dict[str, Counter[str]] = {}
        self._wasted: Counter[str] = Counter()

    def begin(self, buffer: ReplayBuffer, tasks: Iterable[str]) -> None:
        """What a restart found was reported before."""
        for task in tasks:
            self.new_discards(buffer, task)
        self.new_waste(buffer)

    def new_discards(self, buffer: ReplayBuffer, task: str) -> dict[str, int]:
        now = Counter({reason.value: n for reason, n in buffer.discarded(task).items()})
        new = now - self._discarded.get(task, Counter())
        self._discarded[task] = now
        return dict(new)

    def new_waste(self, buffer: ReplayBuffer) -> dict[str, int]:
        now = Counter(buffer.tokens.wasted)
        new = now - self._wasted
        self._wasted = now
        return dict(new)


def task_result(
    runtime: TaskRuntime, groups: list[Group], window: Window, discarded: dict[str, int], train_step: int
) -> TaskResult:
    """Summarise a task and start its next window of durations."""
    seconds = np.asarray(runtime.group_seconds or [0.0])
    count = len(runtime.group_seconds)
    runtime.group_seconds = []
    p50, p99 = (float(value) for value in np.percentile(seconds, [50, 99]))
    return TaskResult(
        groups=len(groups),
        group_time_count=count,
        group_time_mean_s=float(seconds.mean()),
        group_time_p50_s=p50,
        group_time_p99_s=p99,
        group_time_p99_to_p50=p99 / p50 if p50 > 0 else 0.0,
        leftover={status.value: n for status, n in runtime.buffer.count_statuses(runtime.name).items()},
        discarded=discarded,
        staleness=dict(Counter(group_staleness(group, train_step) for group in groups)),
        **msgspec.structs.asdict(window),
    )
