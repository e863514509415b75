"""Trajectories: what was asked, answered and rewarded, one JSON line per rollout, for people and their notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from penstock.errors import StorageError
from penstock.replay import rollout_staleness
from penstock.rollout import Group


class Trajectories:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(
        self, name: str, groups: Iterable[Group], train_step: int, advantages: Mapping[str, float] | None = None
    ) -> None:
        """Write `name.jsonl`, replacing an earlier try of the same step. `advantages` are by rollout id."""
        lines = [
            msgspec.json.encode(
                {
                    "rollout_id": rollout.rollout_id,
                    "group_id": rollout.group_id,
                    "task": rollout.task_name,
                    "data_source": rollout.data_source,
                    "prompt": rollout.messages,
                    "answer": rollout.response_text,
                    "ground_truth": rollout.ground_truth,
                    "reward": rollout.reward,
                    "advantage": (advantages or {}).get(rollout.rollout_id),
                    "finish_reason": rollout.finish_reason,
                    "tokens": rollout.num_tokens,
                    "model_steps": rollout.steps,
                    "staleness": rollout_staleness(rollout, train_step),
                    "num_tries": rollout.num_tries,
                },
                enc_hook=repr,
            )
            for group in groups
            for rollout in group
        ]
        path = self._directory / f"{name}.jsonl"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"\n".join(lines) + b"\n")
        except OSError as error:
            raise StorageError(f"trajectories could not be written to {path}: {error}") from error
