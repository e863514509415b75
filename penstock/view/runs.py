"""The runs below a directory, and what the page asks of one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import RefusedError
from penstock.replay.ledger import LEDGER_FILE
from penstock.trainer.alarms import findings
from penstock.trainer.history import HistoryFile, Point
from penstock.trainer.lines import arithmetic_line
from penstock.trainer.observers import EVENTS_FILE
from penstock.view.groups import Groups, total
from penstock.view.lanes import Activity, rollout_lanes
from penstock.view.rollouts import Rollouts

MAX_POINTS = 2_000
"""Of a curve; more are thinned, the first and the last kept."""
GANTT_STEPS = 12


class Run:
    """One run directory. Every answer is of now."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.name
        self.history = HistoryFile(directory)
        self.groups = Groups(directory)
        self.rollouts = Rollouts(directory)
        self._activity = Activity(directory)
        self.lock = threading.Lock()
        """Held by whoever reads on or answers: the page asks for several things at once, each in a thread."""

    def state(self) -> str:
        """running, done, stopped, failed or killed."""
        ended = self.history.ended
        if ended is not None:
            return "failed" if ended.get("error") else "stopped" if ended.get("interrupted") else "done"
        return "killed" if self.groups.driver_is_gone else "running"

    def brief(self) -> dict[str, Any]:
        """A line of a list of runs."""
        history, began = self.history, self.history.began
        first, last = (history.steps[0], history.steps[-1]) if history.steps else (None, None)
        return {
            "name": self.name,
            "state": self.state(),
            "model": began.get("model", ""),
            "step": last.step if last else 0,
            "total_steps": began.get("total_steps", 0),
            "reward_first": first.metrics.get("reward/mean") if first else None,
            "reward_last": last.metrics.get("reward/mean") if last else None,
            "seconds": history.last_at,
            "last_time": history.last_time,
        }

    def now(self) -> dict[str, Any]:
        """The first panel: where the groups are, who waits for whom, what is wrong."""
        history, states = self.history, self.groups.states()
        state = self.state()
        at = history.last_at + (time.time() - history.last_time if state == "running" else 0.0)
        last = history.steps[-1].metrics if history.steps else {}
        return {
            **self.brief(),
            "at": at,
            "error": (history.ended or {}).get("error"),
            "restarts": history.restarts,
            "arithmetic": arithmetic_line(history.arithmetic) if history.arithmetic is not None else "",
            "published": history.published,
            "tasks": states,
            "flow": {name: last[name] for name in FLOW if name in last},
            "rates": _rates(last),
            "tokens": _token_totals(history.steps),
            "doing": [
                {"lane": span.lane, "stage": span.stage, "train_step": span.train_step, "seconds": at - span.begin}
                for span in history.open_spans
                if state == "running"
            ],
            "engines": {name: msgspec.to_builtins(seen) for name, seen in sorted(history.engines.items())},
            "findings": [msgspec.to_builtins(found) for found in findings(history, total(states), at)],
            "told": [msgspec.to_builtins(told) for told in list(history.told)[-50:]],
            "evaluated": (
                {"step": history.evaluations[-1].step, "metrics": history.evaluations[-1].metrics}
                if history.evaluations
                else None
            ),
            "recent": [
                {"step": point.step, "reward": point.metrics.get("reward/mean")} for point in history.steps[-120:]
            ],
        }

    def batch(self, step: int) -> dict[str, Any]:
        """The groups of a train step, and a lane for each of its rollouts where the run kept their times."""
        groups = self.groups.batch(step)
        lanes, left_out = rollout_lanes(self.directory, step, groups)
        return {"groups": groups, "lanes": [msgspec.to_builtins(lane) for lane in lanes], "left_out": left_out}

    def curves(self, names: list[str]) -> dict[str, Any]:
        """The asked metrics against their step; without names, which there are."""
        history = self.history
        points = history.steps + history.evaluations
        if not names:
            return {"names": sorted({name for point in points for name in point.metrics})}
        return {
            "curves": {
                name: _thinned(history.evaluations if name.startswith("eval/") else history.steps, name)
                for name in names
            }
        }

    def timeline(self, last_step: int | None) -> dict[str, Any]:
        """The spans of a few train steps, those up to `last_step`, or the newest."""
        spans = list(self.history.spans)
        steps = sorted({span.train_step for span in spans if span.train_step is not None})
        if last_step is not None:
            steps = [step for step in steps if step <= last_step]
        shown = set(steps[-GANTT_STEPS:])
        inside = [span for span in spans if span.train_step in shown]
        if not inside:
            return {"spans": [], "steps": []}
        begin = min(span.begin for span in inside)
        end = max(span.end if span.end is not None else self.history.last_at for span in inside)
        beside = [
            span
            for span in spans
            if span.train_step is None and span.begin < end and (span.end is None or span.end > begin)
        ]
        return {
            "spans": [msgspec.to_builtins(span) for span in [*inside, *beside]],
            "away": [
                msgspec.to_builtins(span)
                for span in self.history.away
                if span.begin < end and (span.end is None or span.end > begin)
            ],
            "activity": self._strips(sorted(shown), begin, end),
            "steps": sorted(shown),
            "begin": begin,
            "end": end,
            "first_step": steps[0],
        }

    def _strips(self, steps: list[int], begin: float, end: float) -> dict[str, list[float]]:
        """What the rollouts of these steps did in this time of the run."""
        trained = [point for point in self.history.steps if point.step in steps]
        if not trained:
            return {}
        # The wall clock against the run's: another one after every restart.
        ahead = trained[-1].time - trained[-1].at
        return self._activity.strips(steps, begin + ahead, end + ahead)


FLOW = ("tokens/trained_per_s", "share/trainer_wait", "share/engine_idle", "staleness/mean", "time/step_s")

ENTERS = {
    "completed": ("tokens/generated",),
    "leased": ("trained_tokens", "staleness/masked_tokens", "length/masked_tokens"),
    "trained": ("trained_tokens",),
    "lost": ("tokens/wasted",),
}
"""By the part of the pipe: the tokens that went into it in a step."""


class Runs:
    """A run directory, or a directory of them, looked for again at every question."""

    def __init__(self, directory: Path) -> None:
        """Raises RefusedError when there is no run in it."""
        self.directory = directory
        self._known: dict[str, Run] = {}
        self._lock = threading.Lock()
        if not self.names():
            raise RefusedError(
                f"{directory} has no run ({EVENTS_FILE} or {LEDGER_FILE}); give a run directory, or the directory "
                "that has them"
            )

    def names(self) -> list[str]:
        if _is_run(self.directory):
            return [self.directory.name]
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if path.is_dir() and _is_run(path)]
        return [path.name for path in sorted(found, key=lambda path: -_changed(path))]

    def get(self, name: str) -> Run | None:
        """With what happened until now."""
        if name not in self.names():
            return None
        with self._lock:
            if name not in self._known:
                single = _is_run(self.directory)
                self._known[name] = Run(self.directory if single else self.directory / name)
            run = self._known[name]
        with run.lock:
            run.history.read()
        return run


def _is_run(directory: Path) -> bool:
    return (directory / EVENTS_FILE).is_file() or (directory / LEDGER_FILE).is_file()


def _changed(directory: Path) -> float:
    try:
        return (directory / EVENTS_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _rates(metrics: dict[str, float]) -> dict[str, float]:
    """What went into each part of the pipe, a second of the step: rollouts where they are played, tokens elsewhere."""
    seconds = metrics.get("time/step_s", 0.0)
    if seconds <= 0:
        return {}
    entered = {
        part: sum(metrics.get(name, 0.0) for name in names) for part, names in ENTERS.items() if names[0] in metrics
    }
    if "produce/rollouts" in metrics:
        entered["running"] = metrics["produce/rollouts"]
    return {part: amount / seconds for part, amount in entered.items()}


def _token_totals(steps: list[Point]) -> dict[str, float]:
    totals = {"generated": 0.0, "trained": 0.0, "wasted": 0.0}
    for point in steps:
        totals["generated"] += point.metrics.get("tokens/generated", 0.0)
        totals["trained"] += point.metrics.get("trained_tokens", 0.0)
        totals["wasted"] += point.metrics.get("tokens/wasted", 0.0)
    return totals


def _thinned(points: list[Point], name: str) -> list[tuple[int, float]]:
    found = [(point.step, point.metrics[name]) for point in points if name in point.metrics]
    if len(found) <= MAX_POINTS:
        return found
    stride = -(-len(found) // MAX_POINTS)
    kept = found[::stride]
    return kept if kept[-1] == found[-1] else [*kept, found[-1]]
