"""A task as the manager sees it: its parts, its strategy, its weight."""

from __future__ import annotations

import msgspec

from penstock.produce.context import TaskRuntime
from penstock.produce.strategy import ProduceStrategy


class Task(msgspec.Struct, frozen=True):
    runtime: TaskRuntime
    strategy: ProduceStrategy
    weight: float = 1.0

    @property
    def name(self) -> str:
        return self.runtime.name
