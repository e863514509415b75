"""What a person sees of a run: a live picture in a terminal, one line per step elsewhere.

    reward      the mean reward of every step so far, as a curve
    time        where the seconds of the run went, by stage
    tasks       one bar per task while a batch is produced

A metric that a run does not report is not shown. A display is a sink of the run's events; nothing here waits.
"""

from __future__ import annotations

import abc
import atexit
import io
import itertools
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.events import (
    Alarm,
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

STAGES = {
    "time/produce_s": ("produce", "cyan"),
    "time/prepare_s": ("prepare", "blue"),
    "time/train_s": ("train", "green"),
    "time/checkpoint_s": ("checkpoint", "red"),
    "time/sync_s": ("sync", "magenta"),
    "time/eval_s": ("eval", "yellow"),
}
SHOWN_STAGES = {name for name, _ in STAGES.values()} | {"load", "evaluate", "export"}
"""Those within another are too short to read."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 64
MAX_WAITING = 4096
"""Texts kept for a reader that has stopped."""
DRAIN_TIMEOUT_S = 5.0


class Display(abc.ABC):
    """A sink of the run's events. `notice` raises when nobody can read along any more."""

    _away: frozenset[str] = frozenset()
    """Engines that do not serve."""

    def notice(self, event: Event) -> None:
        match event:
            case RunBegan():
                self.start(f"{event.run_name}: {event.model}", event.total_steps)
            case StageBegan() if event.stage in SHOWN_STAGES:
                self.stage(event.stage)
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
    return LiveDisplay(Console(file=cast(TextIO, out))) if terminal else PlainDisplay(cast(TextIO, out))


class Output:
    """A stream that may hang or break. A thread writes to it, so that nobody waits for who reads it.

    What finds no place because nobody reads is dropped, and so is all that follows an error; `error` says which.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: list[str] = []
        self._writing = False
        self._changed = threading.Condition()
        self.error: Exception | None = None

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with self._changed:
            if self.error is None and len(self._waiting) < MAX_WAITING:
                self._waiting.append(text)
                if not self._writing:
                    self._writing = True
                    threading.Thread(target=self._write_out, name="display", daemon=True).start()
        return len(text)

    def flush(self) -> None:
        """What was written is on its way already."""

    def isatty(self) -> bool:
        return self.error is None and self._stream.isatty()

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Until all is written; not longer than the timeout, for somebody may have stopped reading."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing, timeout_s)

    def _write_out(self) -> None:
        """A thread's life: as long as something waits."""
        while True:
            with self._changed:
                text = "".join(self._waiting)
                self._waiting.clear()
                if not text:
                    self._writing = False
                    self._changed.notify_all()
                    return
            try:
                # A terminal without these letters shows others in their place.
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
                self._stream.flush()
            except (OSError, ValueError) as error:
                with self._changed:
                    self.error = error
                    self._waiting.clear()


class PlainDisplay(Display):
    """Lines for logs and pipes: one per step, one per evaluation."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._total = 0

    def require_readable(self) -> None:
        _require_readable(self._out)

    def start(self, title: str, total_steps: int) -> None:
        self._total = total_steps
        self._line(f"{title}: {total_steps} steps")

    def stage(self, name: str) -> None:
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
        _drain(self._out)

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


def _require_readable(out: Any) -> None:
    error = getattr(out, "error", None)
    if error is not None:
        raise error


def _drain(out: Any) -> None:
    if isinstance(out, Output):
        out.drain()


class LiveDisplay(Display):
    """A picture that is redrawn in place; notes and evaluations scroll away above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._title = ""
        self._total = 0
        self._stage = ""
        self._stage_began = time.monotonic()
        self._began = time.monotonic()
        self._steps = 0
        self._last: Mapping[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._rewards: list[float] = []
        self._evaluations: list[tuple[int, Mapping[str, float]]] = []
        self._tasks: dict[str, tuple[int, int, dict[str, float]]] = {}

    def require_readable(self) -> None:
        _require_readable(self._console.file)

    def start(self, title: str, total_steps: int) -> None:
        self._title, self._total, self._began = title, total_steps, time.monotonic()
        self._go_live()

    def stage(self, name: str) -> None:
        self._stage, self._stage_began, self._tasks = name, time.monotonic(), {}
        self._go_live()

    def progress(self, task: str, done: int, target: int, **fields: float) -> None:
        self._tasks = self._tasks | {task: (done, target, fields)}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps, self._last = step, dict(metrics)
        self._seconds = {key: self._seconds.get(key, 0.0) + metrics.get(key, 0.0) for key in STAGES}
        if "reward/mean" in metrics:
            self._rewards = [*self._rewards, metrics["reward/mean"]]

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluations = [*self._evaluations, (step, dict(metrics))]

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._stage = ""
        self._stop_live()
        table = Table.grid(padding=(0, 2))
        for name, value in summary_rows(summary):
            table.add_row(Text(f"  {name}", style="dim"), Text(value, overflow="fold"))
        self._console.print(table)

    def close(self) -> None:
        self._stop_live()
        _drain(self._console.file)

    def _stop_live(self) -> None:
        if self._live is not None:
            self._tasks = {}
            # Before the run has begun there is only the name of a stage, which need not stay.
            self._live.transient = not self._title
            self._live.stop()
            self._live = None

    def _go_live(self) -> None:
        if self._live is None:
            self._live = Live(get_renderable=self.picture, console=self._console, refresh_per_second=8)
            self._live.start()

    def picture(self) -> RenderableType:
        # Rich asks from its own thread: every attribute is replaced whole, never changed in place.
        if not self._title:
            return Text(f"{self._stage} {time.monotonic() - self._stage_began:.0f} s", style="dim")
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", width=8)
        rows.add_column()
        rows.add_row("run", self._run_row())
        if self._rewards:
            rows.add_row("reward", _curve(self._rewards))
        if self._evaluations:
            rows.add_row("eval", self._eval_row())
        if any(self._seconds.values()):
            rows.add_row("time", _stage_bar(self._seconds))
        speeds = speed_words(self._last) + training_words(self._last)
        if speeds:
            rows.add_row("now", Text("  ".join(speeds)))
        for task, (done, target, fields) in self._tasks.items():
            rows.add_row("", self._task_row(task, done, target, fields))
        return Group(Text(self._title, style="bold"), rows)

    def _run_row(self) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        elapsed = time.monotonic() - self._began
        words = [f"{self._steps}/{self._total}", duration(elapsed)]
        if 0 < self._steps < self._total:
            words.append(f"about {duration(elapsed / self._steps * (self._total - self._steps))} left")
        if self._stage:
            words.append(f"{self._stage} {time.monotonic() - self._stage_began:.0f} s")
        bar = ProgressBar(total=max(self._total, 1), completed=self._steps, width=_WIDTH // 2)
        row.add_row(bar, Text("  ".join(words)))
        return row

    def _eval_row(self) -> Text:
        first_step, first = self._evaluations[0]
        last_step, last = self._evaluations[-1]
        text = Text(f"step {last_step}  {eval_line(last)}")
        if last_step != first_step:
            text.append(f"   (step {first_step}: {eval_line(first)})", style="dim")
        return text

    def _task_row(self, task: str, done: int, target: int, fields: Mapping[str, float]) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        words = [f"{done}/{target} groups"]
        if fields.get("tokens"):
            words.append(f"{count(fields['tokens'] / max(time.monotonic() - self._stage_began, 0.1))} tokens/s")
        words += [f"{int(fields[name])} {name}" for name in ("pending", "expired") if fields.get(name)]
        bar = ProgressBar(total=max(target, 1), completed=min(done, target), width=_WIDTH // 2)
        row.add_row(bar, Text(task, style="bold"), Text("  ".join(words)))
        return row


def step_line(metrics: Mapping[str, float]) -> str:
    """`reward 0.412  loss 0.0021  grad 1.30  2.1 s (produce 1.2, train 0.7)  310 tokens/s`, with what there is."""
    words = []
    if "reward/mean" in metrics:
        words.append(f"reward {metrics['reward/mean']:.3f}")
    words += training_words(metrics)
    discarded = {key.rpartition("/")[2]: value for key, value in metrics.items() if "/discarded/" in key and value}
    if discarded:
        words.append("discarded " + ", ".join(f"{value:.0f} {reason}" for reason, value in discarded.items()))
    if "time/step_s" in metrics:
        stages = [f"{name} {metrics[key]:.1f}" for key, (name, _) in STAGES.items() if metrics.get(key, 0.0) >= 0.05]
        words.append(f"{metrics['time/step_s']:.1f} s" + (f" ({', '.join(stages)})" if stages else ""))
    return "  ".join(words + speed_words(metrics))


def training_words(metrics: Mapping[str, float]) -> list[str]:
    words = []
    if "train/loss" in metrics:
        # Adding 0.0 turns a rounded -0.0 into 0.0.
        words.append(f"loss {round(metrics['train/loss'], 4) + 0.0:.4f}")
    if "train/grad_norm" in metrics:
        words.append(f"grad {metrics['train/grad_norm']:.2f}")
    if metrics.get("staleness/mean"):
        words.append(f"staleness {metrics['staleness/mean']:.1f}")
    return words


def speed_words(metrics: Mapping[str, float]) -> list[str]:
    return [
        f"{count(metrics[key])} tokens/s {verb}"
        for key, verb in (("tokens/generated_per_s", "generated"), ("tokens/trained_per_s", "trained"))
        if key in metrics
    ]


def eval_line(metrics: Mapping[str, float]) -> str:
    """`accuracy 61.0 %  greedy 74.0 %`; metrics of the user's own as they are called."""
    words = [
        f"{name} {100 * metrics[key]:.1f} %"
        for key, name in (("eval/accuracy", "accuracy"), ("eval/greedy_accuracy", "greedy"))
        if key in metrics
    ]
    failed = metrics.get("eval/failed_prompts", 0.0) + metrics.get("eval/greedy_failed_prompts", 0.0)
    if failed:
        words.append(f"{failed:.0f} prompts failed and are not counted")
    if not words:
        words = [f"{key.removeprefix('eval/')} {value:.4g}" for key, value in metrics.items()]
    return "  ".join(words)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values for people; what is None was not measured and is left out."""
    known = {str(name).replace("_", " "): value for name, value in summary.items() if value is not None}
    width = max(map(len, known), default=0)
    return [
        (name.ljust(width), f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in known.items()
    ]


def count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks, means of neighbours when there are more than fit."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)


def _curve(rewards: Sequence[float]) -> Text:
    text = Text(sparkline(rewards, _WIDTH // 2).ljust(min(len(rewards), _WIDTH // 2)), style="green")
    text.append(f"  {rewards[-1]:.3f}", style="bold")
    text.append(f"   first {rewards[0]:.3f}  best {max(rewards):.3f}", style="dim")
    return text


def _stage_bar(seconds: Mapping[str, float]) -> Text:
    """One bar of the run's seconds, a colour per stage, and the legend."""
    total = sum(seconds.values())
    bar, legend = Text(), Text()
    drawn, so_far = 0, 0.0
    for key, (name, colour) in STAGES.items():
        # Rounded cumulatively, so that the parts always fill the bar.
        so_far += seconds[key]
        end = round(_WIDTH // 2 * so_far / total)
        bar.append("█" * (end - drawn), style=colour)
        drawn = end
        if seconds[key] >= 0.005 * total:
            legend.append(f"  {name} ", style=colour)
            legend.append(f"{100 * seconds[key] / total:.0f} %")
    return bar + legend
