"""What happened in a run: `events.jsonl`, folded line by line as it grows."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from penstock.events import UNENDED_STAGES
from penstock.trainer.observers import EVENTS_FILE

MAX_SPANS = 20_000
"""Stages that are kept, the newest; a Gantt of more cannot be read."""
MAX_TOLD = 200
"""Warnings and notes that are kept."""
_AT_ONCE = 1 << 24


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
    metrics: dict[str, float]


class Told(msgspec.Struct, frozen=True):
    time: float
    kind: str
    text: str


class EngineSeen(msgspec.Struct, frozen=True):
    state: str
    since: float
    reason: str
    times_fenced: int = 0


class History:
    """`read` goes on where it stopped. Lines that a kill tore, and kinds it does not know, are passed over."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / EVENTS_FILE
        self.began: dict[str, Any] = {}
        self.ended: dict[str, Any] | None = None
        """The last `run_ended`, until the run begins again."""
        self.last_time = 0.0
        self.last_at = 0.0
        self.steps: list[Point] = []
        self.evaluations: list[Point] = []
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self.told: deque[Told] = deque(maxlen=MAX_TOLD)
        self.engines: dict[str, EngineSeen] = {}
        self.published = 0
        self.restarts = 0
        self._open: dict[tuple[str, str], Span] = {}
        self._offset = 0
        self._rest = b""

    @property
    def open_spans(self) -> list[Span]:
        return [] if self.ended is not None else list(self._open.values())

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
                    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
                        self._fold(msgspec.json.decode(line))

    def _fold(self, event: dict[str, Any]) -> None:
        kind, at = event["kind"], float(event["at"])
        self.last_time, self.last_at = float(event["time"]), at
        fold = getattr(self, f"_{kind}", None)
        if fold is not None:
            fold(event, at)

    def _close_all(self, at: float) -> None:
        """What a process that is gone, or a load that is over, left open."""
        for span in self._open.values():
            span.end = at
        self._open.clear()

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

    def _step_trained(self, event: dict[str, Any], at: float) -> None:
        step = int(event["train_step"])
        while self.steps and self.steps[-1].step >= step:
            self.steps.pop()
        self.steps.append(Point(step, at, _figures(event)))

    def _evaluation_done(self, event: dict[str, Any], at: float) -> None:
        step = int(event["model_step"])
        self.evaluations = [point for point in self.evaluations if point.step != step]
        self.evaluations.append(Point(step, at, _figures(event)))
        self.evaluations.sort(key=lambda point: point.step)

    def _weights_published(self, event: dict[str, Any], at: float) -> None:
        self.published = int(event["model_step"])

    def _engine_changed(self, event: dict[str, Any], at: float) -> None:
        before, state, reason = self.engines.get(event["engine"]), event["state"], event.get("reason", "")
        if state == "fenced" and reason == "closed":
            # As every engine is when its run ends.
            state = "closed"
        fenced = (before.times_fenced if before else 0) + (state == "fenced")
        self.engines[event["engine"]] = EngineSeen(state, at, reason, fenced)

    def _warned(self, event: dict[str, Any], at: float) -> None:
        self.told.append(Told(float(event["time"]), event["kind"], event["text"]))

    _note = _alarm = _warned

    def _step_given_back(self, event: dict[str, Any], at: float) -> None:
        text = f"train step {event['train_step']} was refused: {event['reason']}"
        self.told.append(Told(float(event["time"]), "warned", text))


def _figures(event: dict[str, Any]) -> dict[str, float]:
    """Without those that were NaN or infinite: a line of JSON has null for them."""
    return {name: value for name, value in event["metrics"].items() if value is not None}
