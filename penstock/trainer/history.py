"""What happened in a run, folded event by event: as it is told, or from `events.jsonl` as that grows.

History       what the terminal's picture and the page show, and `alarms.py` looks at
HistoryFile   the same, of a run directory
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec

from penstock.events import UNENDED_STAGES, ArithmeticChosen, Event
from penstock.trainer.observers import EVENTS_FILE

MAX_SPANS = 20_000
"""Stages that are kept, the newest; a Gantt of more cannot be read."""
MAX_TOOK = 50
"""What the last of each stage took: what is usual."""
MAX_AWAY = 500
MAX_TOLD = 200
"""Warnings and notes that are kept."""
_AT_ONCE = 1 << 24
_LOAD = {"running": 0, "waiting": 0, "busy": 0.0, "tokens_per_s": 0.0, "cache_use": 0.0}
"""What an event leaves out when it is so."""


class Span(msgspec.Struct, array_like=True):
    """A stage that took place; `end` is None while it does."""

    lane: str
    stage: str
    train_step: int | None
    begin: float
    end: float | None
    """Seconds since the run began."""


class Point(msgspec.Struct, frozen=True):
    """The figures of one train step or evaluation."""

    step: int
    at: float
    time: float
    """The wall clock's."""
    metrics: dict[str, float]


class Told(msgspec.Struct, frozen=True):
    time: float
    kind: str
    text: str


class Load(msgspec.Struct, frozen=True):
    """Of one engine, when it was last looked at."""

    at: float
    model_step: int
    running: int
    waiting: int
    busy: float
    tokens_per_s: float
    cache_use: float


class EngineStands(msgspec.Struct, frozen=True):
    state: str
    since: float
    reason: str
    times_fenced: int = 0
    load: Load | None = None


class History:
    """Kinds of events that it does not know are passed over."""

    def __init__(self) -> None:
        self.began: dict[str, Any] = {}
        self.arithmetic: ArithmeticChosen | None = None
        """Of the process that is at work, or was last."""
        self.ended: dict[str, Any] | None = None
        """The last `run_ended`, until the run begins again."""
        self.last_time = 0.0
        self.last_at = 0.0
        self.steps: list[Point] = []
        self.evaluations: list[Point] = []
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self.told: deque[Told] = deque(maxlen=MAX_TOLD)
        self.engines: dict[str, EngineStands] = {}
        self.away: deque[Span] = deque(maxlen=MAX_AWAY)
        """When engines did not serve, and what they did instead."""
        self.published = 0
        self.restarts = 0
        self._open: dict[tuple[str, str], Span] = {}
        self._away: dict[str, Span] = {}
        self._took: defaultdict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=MAX_TOOK))

    @property
    def open_spans(self) -> list[Span]:
        return [] if self.ended is not None else list(self._open.values())

    def took(self, lane: str, stage: str) -> list[float]:
        """The seconds of the last stages of this name that ended."""
        return list(self._took.get((lane, stage), ()))

    def notice(self, event: Event, *, at: float) -> None:
        """An event as it is told, so many seconds after the run began."""
        self._fold({"time": 0.0, "at": at, **msgspec.to_builtins(event)})

    def _fold(self, event: dict[str, Any]) -> None:
        kind, at = event["kind"], float(event["at"])
        self.last_time, self.last_at = float(event["time"]), at
        fold = getattr(self, f"_{kind}", None)
        if fold is not None:
            fold(event, at)

    def _close_all(self, at: float) -> None:
        """What a process that is gone, or a load that is over, left open."""
        for span in (*self._open.values(), *self._away.values()):
            span.end = at
        self._open.clear()
        self._away.clear()

    # One for each kind of event that the page shows.

    def _run_began(self, event: dict[str, Any], at: float) -> None:
        self.began = event
        self.ended = None
        self._close_all(at)
        self.engines.clear()
        resumed = event.get("resumed_from")
        if resumed is not None:
            # What came after that checkpoint is of a lineage that was left.
            self.restarts += 1
            self.steps = [point for point in self.steps if point.step <= resumed]
            self.evaluations = [point for point in self.evaluations if point.step <= resumed]

    def _arithmetic_chosen(self, event: dict[str, Any], at: float) -> None:
        self.arithmetic = msgspec.convert(event, ArithmeticChosen)

    def _run_ended(self, event: dict[str, Any], at: float) -> None:
        self.ended = event
        self._close_all(at)

    def _stage_began(self, event: dict[str, Any], at: float) -> None:
        lane, stage = event.get("lane", "trainer"), event["stage"]
        for before in UNENDED_STAGES:
            if (over := self._open.pop((lane, before), None)) is not None:
                over.end = at
        span = Span(lane, stage, event.get("train_step"), at, None)
        self._open[lane, stage] = span
        self.spans.append(span)

    def _stage_ended(self, event: dict[str, Any], at: float) -> None:
        span = self._open.pop((event.get("lane", "trainer"), event["stage"]), None)
        if span is not None:
            span.end = at
            self._took[span.lane, span.stage].append(at - span.begin)

    def _step_trained(self, event: dict[str, Any], at: float) -> None:
        step = int(event["train_step"])
        while self.steps and self.steps[-1].step >= step:
            self.steps.pop()
        self.steps.append(Point(step, at, float(event["time"]), _figures(event)))

    def _evaluation_done(self, event: dict[str, Any], at: float) -> None:
        step = int(event["model_step"])
        self.evaluations = [point for point in self.evaluations if point.step != step]
        self.evaluations.append(Point(step, at, float(event["time"]), _figures(event)))
        self.evaluations.sort(key=lambda point: point.step)

    def _weights_published(self, event: dict[str, Any], at: float) -> None:
        self.published = int(event["model_step"])
        for name, stands in self.engines.items():
            if stands.load is not None:  # one with other weights would not serve
                load = msgspec.structs.replace(stands.load, model_step=self.published)
                self.engines[name] = msgspec.structs.replace(stands, load=load)

    def _engine_changed(self, event: dict[str, Any], at: float) -> None:
        before, state, reason = self.engines.get(event["engine"]), event["state"], event.get("reason", "")
        if state == "fenced" and reason == "closed":
            # As every engine is when its run ends.
            state = "closed"
        fenced = (before.times_fenced if before else 0) + (state == "fenced")
        load = before.load if before is not None and state == "active" else None
        if (over := self._away.pop(event["engine"], None)) is not None:
            over.end = at
        if state not in ("active", "closed"):
            self._away[event["engine"]] = span = Span(event["engine"], state, None, at, None)
            self.away.append(span)
        self.engines[event["engine"]] = EngineStands(state, at, reason, fenced, load)

    def _engine_seen(self, event: dict[str, Any], at: float) -> None:
        before = self.engines.get(event["engine"]) or EngineStands("active", at, "")
        load = msgspec.convert({"at": at} | _LOAD | event, Load)
        self.engines[event["engine"]] = msgspec.structs.replace(before, load=load)

    def _warned(self, event: dict[str, Any], at: float) -> None:
        self.told.append(Told(float(event["time"]), event["kind"], event["text"]))

    _note = _alarm = _warned

    def _step_given_back(self, event: dict[str, Any], at: float) -> None:
        text = f"train step {event['train_step']} was refused: {event['reason']}"
        self.told.append(Told(float(event["time"]), "warned", text))


class HistoryFile(History):
    """`read` goes on where it stopped. Lines that a kill tore are passed over."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.path = run_dir / EVENTS_FILE
        self._offset = 0
        self._rest = b""

    def read(self) -> None:
        """Fold what was appended since. Raises OSError when the file is there and cannot be read."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            while piece := file.read(_AT_ONCE):
                self._offset += len(piece)
                *lines, self._rest = (self._rest + piece).split(b"\n")
                for line in lines:
                    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError):
                        self._fold(msgspec.json.decode(line))


def _figures(event: dict[str, Any]) -> dict[str, float]:
    """Without those that were NaN or infinite: a line of JSON has null for them."""
    return {name: value for name, value in event["metrics"].items() if value is not None}
