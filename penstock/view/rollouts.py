"""Saved rollouts: found through their index, read token by token as they were recorded."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.errors import PenstockError, RefusedError
from penstock.models.resolve import KNOWN_MODELS, find_cached
from penstock.trainer.index import FoundRollout, RolloutIndex
from penstock.trainer.trajectories import SegmentRecord, Trajectory, read_trajectories

PAGE = 50
BINS = 20
MAX_TOKENS_SHOWN = 20_000
"""Of one rollout; a page with more spans is no longer a page."""


class Rollouts:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._index = RolloutIndex(run_dir)
        self._decode = functools.lru_cache(maxsize=65_536)(self._decoded)
        self._tokenizer: Any = None

    @property
    def exist(self) -> bool:
        return self._index.path.is_file()

    def find(self, asked: dict[str, Any], after: str | None) -> dict[str, Any]:
        """A page of what `RolloutIndex.find` finds."""
        if not self.exist:
            return {"rollouts": [], "next": None}
        page = self._index.find(**asked, limit=PAGE, after=after)
        return {"rollouts": [msgspec.to_builtins(found) for found in page.rollouts], "next": page.next}

    def histogram(self, kind: str, step: int | None, task: str | None) -> dict[str, Any] | None:
        """Rewards of a step, or of the newest rollouts, in bins. None without any."""
        if not self.exist:
            return None
        page = self._index.find(kind=kind, step=step, task=task, limit=5_000)  # type: ignore[arg-type]
        rewards = [found.reward for found in page.rollouts if found.reward is not None]
        if not rewards:
            return None
        low, high = min(rewards), max(rewards)
        if low == high:
            low, high = low - 0.5, high + 0.5
        counts, edges = np.histogram(rewards, bins=BINS, range=(low, high))
        return {"counts": counts.tolist(), "edges": edges.tolist(), "of": len(rewards)}

    def read(self, rollout_id: str, kind: str, step: int) -> dict[str, Any] | None:
        """One rollout with its tokens and its siblings' rewards; None when it was not saved."""
        if not self.exist:
            return None
        found = self._index.find(rollout_id=rollout_id, kind=kind, step=step, limit=1).rollouts  # type: ignore[arg-type]
        if not found:
            return None
        line = next(
            (one for one in self._lines(found[0]) if one.rollout_id == rollout_id),
            None,
        )
        if line is None:
            return None
        siblings = self._index.find(group_id=line.group_id, kind=kind, step=step, limit=256).rollouts  # type: ignore[arg-type]
        plain: dict[str, Any] = msgspec.to_builtins(line, builtin_types=(bytes,))
        plain["segments"] = [self._segment(segment) for segment in line.segments]
        plain["prompt_tokens"] = self._texts(np.frombuffer(line.prompt_ids, dtype=np.int32)[:MAX_TOKENS_SHOWN])
        del plain["prompt_ids"]
        plain["kind"], plain["step"] = kind, step
        plain["siblings"] = [
            {"rollout_id": one.rollout_id, "reward": one.reward, "num_tokens": one.num_tokens, "status": one.status}
            for one in sorted(siblings, key=lambda one: one.rollout_id)
        ]
        return plain

    def _lines(self, found: FoundRollout) -> list[Trajectory]:
        return read_trajectories(self._run_dir / "trajectories" / found.file)

    def _segment(self, segment: SegmentRecord) -> dict[str, Any]:
        ids = segment.token_ids[:MAX_TOKENS_SHOWN]
        n = len(ids)
        steps = np.repeat([step for step, _ in segment.steps], [count for _, count in segment.steps])[:n]
        trainer = segment.token_trainer_logprobs
        return {
            "parent": segment.parent,
            "start": segment.start,
            "texts": self._texts(ids),
            "ids": ids.tolist(),
            "logprobs": _numbers(segment.token_logprobs[:n]),
            "trainer_logprobs": None if trainer is None else _numbers(trainer[:n]),
            "mask": segment.token_mask[:n].tolist(),
            "model_steps": steps.tolist(),
            "left_out": len(segment.token_ids) - n,
        }

    def _texts(self, ids: Any) -> list[str]:
        return [self._decode(int(token)) for token in ids]

    def _decoded(self, token: int) -> str:
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._run_dir)
        text = self._tokenizer.decode([token], skip_special_tokens=False) if self._tokenizer else ""
        return text or f"⟨{token}⟩"


def _numbers(values: Any) -> list[float | None]:
    """JSON has no NaN."""
    return [round(float(value), 5) if math.isfinite(value) else None for value in values]


def _tokenizer(run_dir: Path) -> Any:
    """Of the run's model, from its export or its directory; False when it is not on this machine."""
    import tokenizers

    for directory in _model_directories(run_dir):
        file = directory / "tokenizer.json"
        if file.is_file():
            return tokenizers.Tokenizer.from_file(str(file))
    return False


def _model_directories(run_dir: Path) -> list[Path]:
    places = sorted((run_dir / "hf").glob("*"))
    try:
        model = str(json.loads((run_dir / "config.json").read_text())["model"])
    except (OSError, ValueError, KeyError):
        return places
    cached = find_cached(model) if model in KNOWN_MODELS else None
    return [*places, cached or Path(model)]


def refused(error: PenstockError) -> str:
    return "; ".join(error.problems) if isinstance(error, RefusedError) else str(error)
