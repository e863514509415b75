"""Tasks of reasoning-gym by name (extra `gym`).

The first `held_out` entries of the seed are the eval split, those after them the train split. A question that
occurred before is left out, so no question is in both, and a split may be smaller than asked for. Give both splits
the same `size`, `held_out`, `seed` and `params`: some tasks change all their entries with the size.

What reasoning-gym's own scorer needs travels in `extra_info`: `{"gym": name, "params": {...}, "entry": {...}}`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pydantic

from penstock.config import nearest
from penstock.data.generators import GeneratorConfig
from penstock.errors import ConfigError, DatasetError
from penstock.rollout import Prompt, new_rollout


class ReasoningGymConfig(GeneratorConfig):
    """Prompts of a reasoning-gym dataset, made as they are drawn."""

    placeholders = frozenset({"question"})

    name: str
    """As in `reasoning_gym.create_dataset(name)`."""
    size: int = pydantic.Field(default=500, ge=1)
    """The size of the train split, before repeated questions are left out."""
    params: dict[str, Any] = {}
    """Settings of the task, as reasoning-gym names them."""
    template: str = "{question}"
    """What the model is asked, with {question} in it."""
    data_source: str = ""
    """The task's name when empty."""
    timeout_s: float = pydantic.Field(default=600.0, gt=0)
    """How long making the entries may take; some tasks search for their puzzles."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        try:
            gym = _gym()
        except ConfigError as error:
            yield str(error)
            return
        tasks = list(gym.factory.DATASETS)
        if self.name not in tasks:
            yield f"name is {self.name!r}; reasoning-gym has no such task.{nearest(self.name, tasks)}"
        elif taken := sorted({"size", "seed"} & set(self.params)):
            yield f"params has {' and '.join(taken)}; set the field of that name instead."
        else:
            yield from self._param_problems(gym)

    def _param_problems(self, gym: Any) -> Iterator[str]:
        try:
            json.dumps(self.params)
            with warnings.catch_warnings():
                # Some tasks leave the file open that they read.
                warnings.simplefilter("ignore", ResourceWarning)
                gym.create_dataset(self.name, size=1, seed=self.seed, **self.params)
        except Exception as error:  # each task checks its settings in its own way, asserts included
            yield f"params is {self.params!r}; reasoning-gym refuses it for {self.name!r}: {error}"

    def prompts(self) -> Iterator[Prompt]:
        first = 0 if self.split == "eval" else self.held_out
        last = self.held_out if self.split == "eval" else self.held_out + self.size
        seen: set[str] = set()
        for index, entry in enumerate(self._entries(last)):
            repeated = entry["question"] in seen
            seen.add(entry["question"])
            if index >= first and not repeated:
                yield new_rollout(
                    self.template.format(question=entry["question"]),
                    ground_truth=entry["answer"],
                    data_source=self.data_source or self.name,
                    extra_info={"gym": self.name, "params": self.params, "entry": entry},
                ).prompt

    def _entries(self, count: int) -> Iterator[dict[str, Any]]:
        order = {
            "name": self.name,
            "seed": self.seed,
            "params": self.params,
            "size": self.held_out + self.size,
            "count": count,
        }
        where = f"ReasoningGymConfig: task {self.name!r} cannot be used"
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "penstock.data.gym_rows"],
                input=json.dumps(order),
                capture_output=True,
                text=True,
                encoding="utf-8",
                timeout=self.timeout_s,
                # Nothing else of the environment: a fixed hash seed makes tasks that iterate over sets repeatable.
                env={"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "utf-8"},
            )
        except subprocess.TimeoutExpired:
            raise DatasetError(f"{where}: its entries were not made within timeout_s {self.timeout_s:g}") from None
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        for row in rows:
            if "error" in row:
                raise DatasetError(f"{where}: {row['error']}")
        if len(rows) != count:
            raise DatasetError(
                f"{where}: its process ended with code {done.returncode} after {len(rows)} of {count} entries: "
                f"{done.stderr[-500:]}"
            )
        return (row["entry"] for row in rows)


def _gym() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError as error:
        raise ConfigError(f"reasoning-gym is not installed ({error}); pip install 'penstock[gym]'") from error
    return reasoning_gym
