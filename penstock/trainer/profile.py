"""Where a run's time goes, on one timeline: `profile.json`, for chrome://tracing or ui.perfetto.dev.

    trainer      every step, its stages and their parts, nested; those of `train` as the worker measured them
    evaluation   beside the steps in a disaggregated run
    checkpoint   what is written beside the steps
    <task>       each rollout of the task: waiting for the engine, then for its judge
    engine       each step of an embedded engine in this process: prefill, decode, sample

Off by default: then there is no profile, and neither engine nor judgers are wrapped.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

from penstock.events import Event, StageBegan, StageEnded, StepTrained
from penstock.judger import JudgerSet
from penstock.judger.config import JudgerConfig
from penstock.ports import Completion, Engine, GenerateRequest, Judger, Placement
from penstock.rollout import Group, RolloutState, Unjudged, Verdict

TRAINER, ENGINE = "trainer", "engine"
_PARTS = "train/seconds/"


class Profile:
    """A sink of the run's events. Spans of one lane follow or contain each other; those of a rollout carry its id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.perf_counter()
        # The engine's thread finds its lane there.
        self._lanes: dict[str, int] = {TRAINER: 1, ENGINE: 2}
        self._ids = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self._open: dict[tuple[str, str], float] = {}
        self._trained_at = 0.0

    def notice(self, event: Event) -> None:
        if isinstance(event, StageBegan):
            self._open[event.lane, event.stage] = time.perf_counter()
        elif isinstance(event, StageEnded):
            started = self._open.pop((event.lane, event.stage), self._began)
            name = f"step {event.train_step}" if event.stage == "step" else event.stage
            self._add(name, started, time.perf_counter(), event.lane, {})
            if event.stage == "train":
                self._trained_at = started
        elif isinstance(event, StepTrained):
            self._parts_of_training(event.metrics)

    def close(self) -> None:
        """Write it, also that of a run which failed. Raises OSError."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": tid, "args": {"name": lane}}
            for lane, tid in self._lanes.items()
        ]
        # Of two that begin together the longer one comes first: it contains the other.
        events = sorted(self._events, key=lambda event: (event["ts"], -event.get("dur", 0)))
        self._path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def rollout(self, name: str, *, task: str, rollout_id: str) -> AbstractContextManager[None]:
        """One of many at the same time; all of a task share a lane."""
        return self._overlapping(name, task, rollout_id)

    def _parts_of_training(self, metrics: Mapping[str, float]) -> None:
        """A worker's `seconds/<part>`, in the order it did them. Several micro-batches take turns; here they add up."""
        parts = {name.removeprefix(_PARTS): s for name, s in metrics.items() if name.startswith(_PARTS)}
        started = self._trained_at
        end = started + parts.pop("total", sum(parts.values()))
        for name, seconds in parts.items():
            # Each was measured within the total; rounding must not carry the last one out of it.
            stopped = min(started + seconds, end)
            micro_batches = {"micro_batches": metrics.get("train/micro_batches", 1.0)}
            self._add(name, started, stopped, TRAINER, micro_batches)
            started = stopped

    def wrap_engine(self, door: Engine) -> Engine:
        """The same door, with every answer on the timeline, and every step of an engine in this process."""
        from penstock.engine.controller import RolloutController
        from penstock.engine.torch_engine.engine import EmbeddedEngine

        for engine in door.engines.values() if isinstance(door, RolloutController) else ():
            if isinstance(engine, EmbeddedEngine):
                engine.watch(lambda stage, began, ended: self._add(stage, began, ended, ENGINE, {}))
        return cast(Engine, _TimedEngine(door, self))

    def judgers(
        self,
        placement: Placement | None = None,
        output: str | None = None,
        ports: Mapping[str, Any] | None = None,
    ) -> JudgerSet:
        return _TimedJudgers(self, placement, output, ports)

    @contextlib.contextmanager
    def _overlapping(self, name: str, task: str, rollout_id: str) -> Iterator[None]:
        number = next(self._ids)
        self._event("b", name, time.perf_counter(), task, cat=task, id=number, args={"rollout": rollout_id})
        try:
            yield
        finally:
            self._event("e", name, time.perf_counter(), task, cat=task, id=number)

    def _add(self, name: str, started: float, ended: float, lane: str, arguments: Mapping[str, float]) -> None:
        end = self._microseconds(ended)
        self._event("X", name, started, lane, dur=end - self._microseconds(started), args=dict(arguments))

    def _event(self, phase: str, name: str, at: float, lane: str, **fields: Any) -> None:
        tid = self._lanes.setdefault(lane, len(self._lanes) + 1)
        ts = self._microseconds(at)
        self._events.append({"name": name, "ph": phase, "ts": ts, "pid": os.getpid(), "tid": tid, **fields})

    def _microseconds(self, at: float) -> int:
        return round((at - self._began) * 1e6)


class _TimedEngine:
    """An engine whose answers are on the timeline; everything else is the engine itself."""

    def __init__(self, engine: Engine, profile: Profile) -> None:
        self._engine = engine
        self._profile = profile

    async def generate(self, request: GenerateRequest) -> Completion:
        # A group's id is its task and a number.
        task = request.group_id.rpartition(":")[0]
        with self._profile.rollout("generate", task=task, rollout_id=request.request_id):
            return await self._engine.generate(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _TimedJudgers(JudgerSet):
    def __init__(
        self, profile: Profile, placement: Placement | None, output: str | None, ports: Mapping[str, Any] | None
    ) -> None:
        super().__init__(placement, output=output, ports=ports)
        self._profile = profile

    def get(self, config: JudgerConfig) -> Judger:
        return _TimedJudger(super().get(config), self._profile)


class _TimedJudger(Judger):
    def __init__(self, judger: Judger, profile: Profile) -> None:
        self._judger = judger
        self._profile = profile
        self.relative = judger.relative

    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        with self._profile.rollout("judge", task=rollout.task_name, rollout_id=rollout.rollout_id):
            return await self._judger.judge(rollout)

    async def judge_group(self, group: Group) -> list[Verdict | Unjudged]:
        with self._profile.rollout("judge", task=group[0].task_name, rollout_id=group[0].group_id):
            return await self._judger.judge_group(group)

    async def metrics(self) -> dict[str, float]:
        return await self._judger.metrics()

    async def close(self) -> None:
        await self._judger.close()
