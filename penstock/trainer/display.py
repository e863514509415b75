"""What a person sees of a run: a live picture in a terminal (`picture.py`), one line per step elsewhere.

A display is a sink of the run's events; nothing here waits. What is written goes out through an `Output`, which drops
what cannot be shown.
"""

from __future__ import annotations

import abc
import atexit
import io
import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast

from penstock.events import (
    Alarm,
    ArithmeticChosen,
    EngineChanged,
    EvaluationDone,
    Event,
    Note,
    RunBegan,
    RunEnded,
    StageBegan,
    StepGivenBack,
    StepTrained,
    TaskProgress,
    Warned,
)
from penstock.trainer.lines import STAGES, arithmetic_line, eval_line, step_line, summary_rows
from penstock.trainer.output import Output

SHOWN_STAGES = {name for name, _ in STAGES.values()} | {"load", "scan", "evaluate", "export"}
"""Those within another are too short to read."""


class Display(abc.ABC):
    """A sink of the run's events. `notice` raises when nobody can read along any more."""

    _away: frozenset[str] = frozenset()
    """Engines that do not serve."""

    def notice(self, event: Event) -> None:
        match event:
            case RunBegan():
                self.start(f"{event.run_name}: {event.model}", event.total_steps)
            case StageBegan(stage="step"):
                self.step_begins()
            case StageBegan() if event.stage in SHOWN_STAGES:
                self.stage(f"{event.stage} {event.detail}" if event.detail else event.stage)
            case TaskProgress():
                rest = {"pending": event.pending, "expired": event.expired, "tokens": event.tokens}
                self.progress(event.task, event.done, event.due, **rest)
            case StepTrained():
                self.step(event.train_step, event.metrics)
            case EvaluationDone():
                self.evaluated(event.model_step, event.metrics)
            case StepGivenBack():
                self.note(f"train step {event.train_step} refused: {event.reason}")
            case EngineChanged() if event.reason != "closed":
                self._engine_changed(event)
            case ArithmeticChosen():
                self.note(arithmetic_line(event))
            case Warned():
                self.note(f"warning: {event.text}")
            case Note() | Alarm():
                self.note(event.text)
            case RunEnded() if event.error is None:
                self.finish(event.summary)
        self.require_readable()

    def _engine_changed(self, event: EngineChanged) -> None:
        """That one is away is shown, and that it is back; not that it began to serve."""
        if event.state != "active" or event.engine in self._away:
            self.note(f"{event.engine} is {event.state}{f': {event.reason}' if event.reason else ''}")
        self._away = self._away - {event.engine} if event.state == "active" else self._away | {event.engine}

    @abc.abstractmethod
    def require_readable(self) -> None:
        """Raises OSError or ValueError when what was written did not arrive."""

    @abc.abstractmethod
    def start(self, title: str, total_steps: int) -> None: ...

    @abc.abstractmethod
    def stage(self, name: str) -> None:
        """What the run does now: produce, train, sync, ..."""

    @abc.abstractmethod
    def step_begins(self) -> None: ...

    @abc.abstractmethod
    def progress(self, task: str, done: int, target: int, **fields: float) -> None:
        """Groups of a task that are ready, of those wanted. Fields, when known: pending, expired, tokens (so far)."""

    @abc.abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    @abc.abstractmethod
    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """One line that stays."""

    @abc.abstractmethod
    def finish(self, summary: Mapping[str, Any]) -> None: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Give the terminal back. Idempotent; also after an error."""


def make_display(terminal: bool) -> Display:
    # None when the process was started without one.
    out = Output(sys.stdout if sys.stdout is not None else io.StringIO())
    # A process that ends before its display is closed, such as one that refuses, has shown why first.
    atexit.register(out.drain)
    if not terminal:
        return PlainDisplay(cast(TextIO, out))
    from rich.console import Console

    from penstock.trainer.picture import LiveDisplay

    return LiveDisplay(Console(file=cast(TextIO, out)))


def require_readable(out: Any) -> None:
    error = getattr(out, "error", None)
    if error is not None:
        raise error


def drain(out: Any) -> None:
    if isinstance(out, Output):
        out.drain()


class PlainDisplay(Display):
    """Lines for logs and pipes: one for what is loaded, one per step, one per evaluation."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._total = 0
        self._said_load = False

    def require_readable(self) -> None:
        require_readable(self._out)

    def start(self, title: str, total_steps: int) -> None:
        self._total = total_steps
        self._line(f"{title}: {total_steps} steps")

    def stage(self, name: str) -> None:
        # The first alone, which names the model: what it takes may be minutes in which nothing else is said.
        if name.startswith("load ") and not self._said_load:
            self._said_load = True
            self._line(name)

    def step_begins(self) -> None:
        pass

    def progress(self, task: str, done: int, target: int, **fields: float) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._line(f"step {step:>{len(str(self._total))}}/{self._total}  {step_line(metrics)}")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._line(f"eval after step {step}  {eval_line(metrics)}")

    def note(self, text: str) -> None:
        self._line(text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for name, value in summary_rows(summary):
            self._line(f"  {name}  {value}")

    def close(self) -> None:
        drain(self._out)

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()
