"""ProduceProgress: what is due, what was consumed, and at which steps producer and consumer stand.

Shared by both and changed in place only. The counts are absolute numbers of groups per task since the run began, so
a batch that was taken never looks like a shortage and a group that expired does. Strategies read it; only the manager
and the context write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

AllocateBatchSizes = Callable[[int, int], dict[str, int]]
"""(batch size, train step) -> groups per task."""


class Window(msgspec.Struct):
    """What was produced for one task since the last non-empty batch. Counts rollouts, each once."""

    raw_reward_sum: float = 0.0
    raw_reward_count: int = 0
    produced_rollouts: int = 0
    produced_tokens: int = 0
    failed: int = 0
    filtered: int = 0


class ProduceProgress:
    def __init__(self, task_names: Iterable[str]) -> None:
        names = list(task_names)
        self.target_samples: dict[str, int] = dict.fromkeys(names, 0)
        """Groups due up to and including `target_upto_future_step`."""
        self.consumed_samples: dict[str, int] = dict.fromkeys(names, 0)
        """Groups leased or trained in the surviving lineage."""
        self.last_due_step: dict[str, int] = dict.fromkeys(names, 0)
        """The last step up to `target_upto_future_step` in whose batch a task has a share."""
        self.target_upto_future_step = 0
        self.next_consumer_step = 1
        """The step that new samples will serve; decides staleness when a group is stored."""
        self.producer_future_step = 1
        """The step being produced; decides whether the model is too old."""
        self.windows: dict[str, Window] = {name: Window() for name in names}
        self.produce_time_s = 0.0
        """Wall time inside production since the last non-empty batch, without waiting."""
        self.finished_groups = 0
        """Groups that were played and judged; the watchdog looks at nothing else. A failed group is no progress."""

    @classmethod
    def build(cls, task_names: Iterable[str]) -> ProduceProgress:
        return cls(task_names)

    @classmethod
    def build_local(
        cls,
        task_names: Iterable[str],
        sizes: Mapping[str, int],
        train_step: int,
        consumed: Mapping[str, int] | None = None,
    ) -> ProduceProgress:
        """For one colocated call: due are `sizes` beyond what was consumed before."""
        progress = cls(task_names)
        progress.consumed_samples.update(consumed or {})
        progress.begin_local(sizes, train_step)
        return progress

    def begin_local(self, sizes: Mapping[str, int], train_step: int) -> None:
        """A colocated call begins: due are `sizes` beyond what was consumed, for this step alone."""
        for task, size in sizes.items():
            self.target_samples[task] = self.consumed_samples[task] + size
            self.last_due_step[task] = train_step
        self.target_upto_future_step = train_step
        self.next_consumer_step = self.producer_future_step = train_step

    def ensure_target_upto(
        self, batch_size: int, future_step: int, allocate_batch_sizes: AllocateBatchSizes
    ) -> dict[str, int]:
        """Make everything due up to `future_step`; idempotent. Returns the allocation of `future_step`."""
        for step in range(self.target_upto_future_step + 1, future_step + 1):
            for task, size in allocate_batch_sizes(batch_size, step).items():
                self.target_samples[task] += size
                if size:
                    self.last_due_step[task] = step
            self.target_upto_future_step = step
        return allocate_batch_sizes(batch_size, future_step)

    def begin_consume(self, train_step: int) -> None:
        self.next_consumer_step = train_step

    def mark_consumed(self, sizes: Mapping[str, int]) -> None:
        """A batch was taken. No await may stand between taking it and this call."""
        for task, size in sizes.items():
            self.consumed_samples[task] += size

    def mark_returned(self, sizes: Mapping[str, int]) -> None:
        """A taken batch came back: a refused step or a dropped lease."""
        for task, size in sizes.items():
            self.consumed_samples[task] -= size

    def finish_consume(self, train_step: int) -> None:
        """A non-empty batch for `train_step` was handed out."""
        self.next_consumer_step = train_step + 1

    def restart(self, checkpoint_step: int, consumed: Mapping[str, int]) -> None:
        """Go on after `checkpoint_step`, up to which `consumed` groups were trained; what waits counts as available."""
        self.consumed_samples.update(consumed)
        self.target_samples.update(consumed)
        self.last_due_step.update(dict.fromkeys(consumed, checkpoint_step))
        self.target_upto_future_step = checkpoint_step
        self.next_consumer_step = self.producer_future_step = checkpoint_step + 1

    def advance_future_step(self) -> None:
        self.producer_future_step += 1

    def take_window(self) -> tuple[dict[str, Window], float]:
        """Read the window metrics and start a new window."""
        windows, seconds = self.windows, self.produce_time_s
        self.windows = {name: Window() for name in windows}
        self.produce_time_s = 0.0
        return windows, seconds

    def state_dict(self) -> dict[str, Any]:
        return {
            "target_samples": dict(self.target_samples),
            "consumed_samples": dict(self.consumed_samples),
            "last_due_step": dict(self.last_due_step),
            "target_upto_future_step": self.target_upto_future_step,
            "next_consumer_step": self.next_consumer_step,
            "producer_future_step": self.producer_future_step,
            "windows": {task: msgspec.to_builtins(window) for task, window in self.windows.items()},
            "produce_time_s": self.produce_time_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Changes this object in place. A missing window loads as 0; a missing task is an error."""
        for key in ("target_samples", "consumed_samples", "last_due_step"):
            saved, here = state[key], getattr(self, key)
            if set(saved) != set(here):
                raise ValueError(f"progress: {key} was saved for tasks {sorted(saved)}, this run has {sorted(here)}")
            here.update(saved)
        self.target_upto_future_step = state["target_upto_future_step"]
        self.next_consumer_step = state["next_consumer_step"]
        self.producer_future_step = state["producer_future_step"]
        windows = state.get("windows", {})
        for task in self.windows:
            self.windows[task] = msgspec.convert(windows.get(task, {}), Window)
        self.produce_time_s = state.get("produce_time_s", 0.0)
