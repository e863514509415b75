"""What is worth showing, told once, to the `Observer` port.

The display, the trackers, the profile and the run's event file are sinks of this one stream. An event is a fact with a
name; the sink that keeps it stamps it with the time. A sink that fails never ends a run, and nobody waits for one.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).removeprefix("_")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=_snake, omit_defaults=True):
    """Base of all events."""


class RunBegan(Event, frozen=True, kw_only=True):
    run_name: str
    model: str
    total_steps: int
    resumed_from: int | None = None
    """The checkpoint's step."""


class RunEnded(Event, frozen=True, kw_only=True):
    steps: int
    interrupted: bool = False
    error: str | None = None
    summary: dict[str, str | float | bool | None] = {}
    """What the run came to, as in `summary.json`."""


class ArithmeticChosen(Event, frozen=True, kw_only=True):
    """What `dtype="auto"` stands for in this run; None for a part that does not say it."""

    train: str | None = None
    engine: str | None = None
    cpu: str
    began_on: str = ""
    """The CPU on which it was found, of a run that goes on with what it began with."""
    others_take: dict[str, float] = {}
    """By part: the time of what was left aside, over that of what was taken; empty where nothing was tried."""


class StageBegan(Event, frozen=True, kw_only=True):
    stage: str
    detail: str = ""
    """What is loaded, scanned, ...; for people."""
    train_step: int | None = None
    lane: str = "trainer"


UNENDED_STAGES = frozenset({"load", "scan", "evaluate"})
"""Told to begin, for people who wait, and never to end: they are over when the next stage begins."""


class StageEnded(Event, frozen=True, kw_only=True):
    stage: str
    seconds: float
    train_step: int | None = None
    lane: str = "trainer"


class TaskProgress(Event, frozen=True, kw_only=True):
    """How far a task's part of a batch is. Many a second: shown, not kept."""

    task: str
    done: int
    due: int
    pending: int = 0
    expired: int = 0
    tokens: int = 0


class BatchTaken(Event, frozen=True, kw_only=True):
    train_step: int
    groups: int
    status: str
    staleness: dict[str, dict[int, int]] = {}
    """Groups by staleness, per task."""


class StepTrained(Event, frozen=True, kw_only=True):
    train_step: int
    metrics: dict[str, float]


class StepGivenBack(Event, frozen=True, kw_only=True):
    """A train step that was refused; its groups wait again."""

    train_step: int
    reason: str


class WeightsPublished(Event, frozen=True, kw_only=True):
    model_step: int
    num_bytes: int
    seconds: float


class EngineChanged(Event, frozen=True, kw_only=True):
    engine: str
    state: str
    reason: str = ""


class EngineSeen(Event, frozen=True, kw_only=True):
    """How an engine does, every few seconds while it is active. Shown as it comes, kept now and then."""

    engine: str
    model_step: int
    running: int = 0
    waiting: int = 0
    busy: float = 0.0
    """Share of the time since it was last seen, 0 to 1."""
    tokens_per_s: float = 0.0
    cache_use: float = 0.0


class ActorLost(Event, frozen=True, kw_only=True):
    """An actor or a train rank died, or does not answer and was killed. What it did is done again, elsewhere or when it
    is back."""

    actor: str
    reason: str


class ActorRecovered(Event, frozen=True, kw_only=True):
    actor: str
    seconds: float
    """That it was missing."""
    node: str = ""


class EvaluationDone(Event, frozen=True, kw_only=True):
    model_step: int
    metrics: dict[str, float]


class CheckpointWritten(Event, frozen=True, kw_only=True):
    train_step: int
    seconds: float


class Exported(Event, frozen=True, kw_only=True):
    train_step: int
    directory: str


class Note(Event, frozen=True, kw_only=True):
    """For people; nothing is wrong."""

    text: str


class Warned(Event, frozen=True, kw_only=True):
    text: str
    source: str = ""


class Alarm(Event, frozen=True, kw_only=True):
    """Something that wants a person's attention now."""

    text: str


AnyEvent = (
    RunBegan
    | RunEnded
    | ArithmeticChosen
    | StageBegan
    | StageEnded
    | TaskProgress
    | BatchTaken
    | StepTrained
    | StepGivenBack
    | WeightsPublished
    | EngineChanged
    | EngineSeen
    | ActorLost
    | ActorRecovered
    | EvaluationDone
    | CheckpointWritten
    | Exported
    | Note
    | Warned
    | Alarm
)
"""For decoding a kept event."""


class Observer(Protocol):
    def notice(self, event: Event) -> None:
        """Returns at once and never raises."""
        ...


class Nobody:
    """Looks away."""

    def notice(self, event: Event) -> None:
        pass
