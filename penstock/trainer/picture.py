"""The live picture of a run. Every row is one line of the terminal, whatever its width and whatever the numbers are.

    run         how far it is, how long it will take, and what it does now
    reward      the mean reward of every step so far, as a curve
    eval        the last evaluation, beside the first
    time        where the seconds of the run went, by stage
    groups      what became of those that were drawn: trained, discarded by reason, waiting
    pipe        who waits for whom, and which share of the tokens was for nothing
    now         loss, gradient and speed of the last step
    engines     which do not serve and why; the others' weights and load
    alarm, tip  what wants a person's attention, in words
    <task>      one bar per task while a batch is produced

Words that do not fit are left out, the last ones first, and bars shrink to what is left. Only alarms and tips go on in
a second line.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.events import Event, TaskProgress
from penstock.trainer.alarms import Finding, findings
from penstock.trainer.display import Display, drain, require_readable
from penstock.trainer.flow import Flow
from penstock.trainer.history import History
from penstock.trainer.lines import (
    STAGES,
    count,
    duration,
    engine_words,
    eval_figures,
    speed_words,
    summary_rows,
    training_words,
)

_LABEL = 10
_BAR = 32
_SHORTEST_BAR = 8
_LONGEST_NAME = 24
_MOST_FINDINGS = 3
_LINES_EACH = 2
_LOOK_EVERY_S = 1.0
"""At what is wrong."""


class Glyphs:
    """What curves and bars are drawn with."""

    def __init__(self, *, ascii_only: bool) -> None:
        self.steps = "_.-:=+*#" if ascii_only else "▁▂▃▄▅▆▇█"
        self.done, self.due = ("#", "-") if ascii_only else ("━", "─")
        self.full = "#" if ascii_only else "█"


class LiveDisplay(Display):
    """A picture that is redrawn in place; notes scroll away above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._title = ""
        self._total = 0
        self._stage = ""
        self._stage_began = self._began = clock()
        self._steps = 0
        self._first_step: tuple[float, int] | None = None
        """When this process began to train, and after how many steps: not with the first evaluation, nor at 0 when
        it resumed."""
        self._last_step_ended = 0.0
        self._last: Mapping[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._flow = Flow()
        self._rewards: list[float] = []
        self._evaluations: list[tuple[int, Mapping[str, float]]] = []
        self._tasks: dict[str, tuple[int, int, dict[str, float]]] = {}
        self._history = History()
        self._reading = threading.Lock()
        """The history changes in place, and rich looks from its own thread."""
        self._found: tuple[float, list[Finding]] = (-math.inf, [])
        """When it was last looked, and what is wrong."""

    def notice(self, event: Event) -> None:
        if not isinstance(event, TaskProgress):
            with self._reading:
                self._history.notice(event, at=self._clock() - self._began)
        super().notice(event)

    def require_readable(self) -> None:
        require_readable(self._console.file)

    def start(self, title: str, total_steps: int) -> None:
        self._title, self._total, self._began = title, total_steps, self._clock()
        self._go_live()

    def stage(self, name: str) -> None:
        self._stage, self._stage_began, self._tasks = name, self._clock(), {}
        self._go_live()

    def step_begins(self) -> None:
        if self._first_step is None:
            self._first_step = self._clock(), self._steps

    def progress(self, task: str, done: int, target: int, **fields: float) -> None:
        self._tasks = self._tasks | {task: (done, target, fields)}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps, self._last, self._last_step_ended = step, dict(metrics), self._clock()
        spent = {key: metrics.get(key, 0.0) for key in STAGES}
        self._seconds = {
            key: self._seconds.get(key, 0.0) + (seconds if 0 <= seconds < math.inf else 0.0)
            for key, seconds in spent.items()
        }
        self._flow = self._flow.after(metrics)
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
        drain(self._console.file)

    def _stop_live(self) -> None:
        if self._live is not None:
            self._tasks = {}
            # Before the run has begun there is only the name of a stage, which need not stay.
            self._live.transient = not self._title
            self._live.stop()
            self._live = None

    def _go_live(self) -> None:
        if self._live is None:
            self._live = Live(get_renderable=lambda: self, console=self._console, refresh_per_second=8)
            self._live.start()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Rich asks from its own thread: every attribute is replaced whole, never changed in place.
        for row in self.rows(options.max_width, Glyphs(ascii_only=options.ascii_only)):
            row.no_wrap = True
            row.truncate(options.max_width, overflow="crop" if options.ascii_only else "ellipsis")
            yield row

    def rows(self, width: int, glyphs: Glyphs) -> Iterator[Text]:
        """One line each; `width` is what there is."""
        doing = f"{self._stage} {self._clock() - self._stage_began:.0f} s" if self._stage else ""
        if not self._title:
            yield Text(doing, style="dim")
            return
        room = max(0, width - _LABEL)
        yield Text(self._title, style="bold")
        yield _row("run", _with_bar(self._run_words(doing), room, _share_bar(self._steps, self._total, glyphs)))
        if self._rewards:
            yield _row("reward", self._reward_row(room, glyphs))
        if self._evaluations:
            yield _row("eval", _fitting(self._eval_words(), room))
        if sum(self._seconds.values()) > 0:
            yield _row("time", _with_bar(_stage_words(self._seconds), room, _stage_bar(self._seconds, glyphs)))
        if groups := self._flow.group_words():
            yield _row("groups", _fitting([Text(word) for word in groups], room))
        if waits := self._flow.pipe_words(self._last):
            yield _row("pipe", _fitting([Text(word) for word in waits], room))
        if speeds := training_words(self._last) + speed_words(self._last):
            yield _row("now", _fitting([Text(word) for word in speeds], room))
        yield from self._engine_rows(room)
        yield from self._finding_rows(room)
        for task, (done, target, fields) in self._tasks.items():
            words = [Text(task[:_LONGEST_NAME], style="bold"), *map(Text, self._task_words(done, target, fields))]
            yield _row("", _with_bar(words, room, _share_bar(done, target, glyphs)))

    def _engine_rows(self, room: int) -> Iterator[Text]:
        with self._reading:
            away, words = engine_words(self._history.engines)
        if words:
            yield _row("engines", _fitting([*(Text(word, style="red") for word in away), *map(Text, words)], room))

    def _finding_rows(self, room: int) -> Iterator[Text]:
        now = self._clock()
        looked_at, found = self._found
        if now - looked_at >= _LOOK_EVERY_S:
            with self._reading:
                found = findings(self._history, self._flow.states, now - self._began)
            self._found = now, found
        for finding in found[:_MOST_FINDINGS]:
            style = "bold red" if finding.level == "alarm" else "yellow"
            for number, line in enumerate(textwrap.wrap(finding.text, max(1, room), max_lines=_LINES_EACH)):
                yield _row("" if number else finding.level, Text(line, style=style))
        if len(found) > _MOST_FINDINGS:
            yield _row("", Text(f"and {len(found) - _MOST_FINDINGS} more: penstock view", style="dim"))

    def _run_words(self, doing: str) -> list[Text]:
        words = [f"{self._steps}/{self._total}"]
        if (left := self._seconds_left()) is not None:
            words.append(f"about {duration(left)} left")
        return [Text(word) for word in (*words, doing, f"{duration(self._clock() - self._began)} so far") if word]

    def _seconds_left(self) -> float | None:
        """By the steps that this process trained, and what lay between them."""
        if self._first_step is None or not self._steps < self._total:
            return None
        began, before = self._first_step
        if self._steps <= before:
            return None
        per_step = (self._last_step_ended - began) / (self._steps - before)
        return max(0.0, per_step * (self._total - self._steps) - (self._clock() - self._last_step_ended))

    def _reward_row(self, room: int, glyphs: Glyphs) -> Text:
        rewards = self._rewards
        words = [Text(f"{rewards[-1]:.3f}", style="bold")]
        beside = {"first": rewards[0], "best": max(rewards)}
        words += [Text(f"{name} {value:.3f}", style="dim") for name, value in beside.items()]
        return _with_bar(words, room, lambda width: Text(sparkline(rewards, width, glyphs.steps), style="green"))

    def _eval_words(self) -> list[Text]:
        (first_step, first), (last_step, last) = self._evaluations[0], self._evaluations[-1]
        words = [Text(f"step {last_step}"), *(Text(f"{name} {value}") for name, value in eval_figures(last))]
        if last_step != first_step:
            before = ", ".join(value for _, value in eval_figures(first))
            words.append(Text(f"(step {first_step}: {before})", style="dim"))
        return words

    def _task_words(self, done: int, target: int, fields: Mapping[str, float]) -> Iterator[str]:
        yield f"{done}/{target} groups"
        if fields.get("tokens"):
            yield f"{count(fields['tokens'] / max(self._clock() - self._stage_began, 0.1))} tokens/s"
        yield from (f"{int(fields[name])} {name}" for name in ("pending", "expired") if fields.get(name))


def sparkline(values: Sequence[float], width: int, steps: str = "▁▂▃▄▅▆▇█") -> str:
    """The values as blocks, means of neighbours when there are more than fit."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    # Halves: the difference of two numbers may be too large for one.
    low, span = min(finite) / 2, max(finite) / 2 - min(finite) / 2
    scale = (len(steps) - 1) / span if span > 0 else 0.0
    return "".join(
        steps[_place(value / 2 - low, scale, len(steps))] if math.isfinite(value) else " " for value in values
    )


def _place(above: float, scale: float, steps: int) -> int:
    return min(round(above * scale), steps - 1) if scale < math.inf else 0


Bar = Callable[[int], Text]
"""Draws itself in at most so many columns."""


def _row(label: str, content: Text) -> Text:
    row = Text()
    row.append(label.ljust(_LABEL), style="dim")
    return row.append_text(content)


def _fitting(words: Sequence[Text], room: int) -> Text:
    """As many of the first words as there is room for, but always one."""
    text = Text().append_text(words[0])
    for word in words[1:]:
        if text.cell_len + 2 + word.cell_len > room:
            break
        text.append("  ").append_text(word)
    return text


def _with_bar(words: Sequence[Text], room: int, bar: Bar) -> Text:
    text = _fitting(words, room)
    width = min(_BAR, room - text.cell_len - 2)
    if width < _SHORTEST_BAR:
        return text
    return Text().append_text(bar(width)).append("  ").append_text(text)


def _share_bar(done: int, target: int, glyphs: Glyphs) -> Bar:
    def draw(width: int) -> Text:
        filled = round(width * min(done, target) / max(target, 1))
        return Text().append(glyphs.done * filled, style="green").append(glyphs.due * (width - filled), style="dim")

    return draw


def _stage_words(seconds: Mapping[str, float]) -> list[Text]:
    total = sum(seconds.values())
    words = []
    for key, (name, colour) in STAGES.items():
        if seconds[key] >= 0.005 * total:
            words.append(Text().append(f"{name} ", style=colour).append(f"{100 * seconds[key] / total:.0f} %"))
    return words


def _stage_bar(seconds: Mapping[str, float], glyphs: Glyphs) -> Bar:
    """The run's seconds, a colour per stage."""

    def draw(width: int) -> Text:
        bar, drawn, so_far = Text(), 0, 0.0
        for key, (_, colour) in STAGES.items():
            # Rounded cumulatively, so that the parts always fill the bar.
            so_far += seconds[key]
            end = round(width * so_far / sum(seconds.values()))
            bar.append(glyphs.full * (end - drawn), style=colour)
            drawn = end
        return bar

    return draw
