"""`summary.json`: what a run came to. A sink that adds up the run's events; the loops never read it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.events import (
    ActorLost,
    ActorRecovered,
    EngineChanged,
    EvaluationDone,
    Event,
    Exported,
    StageBegan,
    StageEnded,
    StepGivenBack,
    StepTrained,
)
from penstock.trainer.useful import Recovery


class Summary(msgspec.Struct, kw_only=True):
    steps: int = 0
    interrupted: bool = False
    reward_first: float | None = None
    """The mean reward of the first step, and of the last."""
    reward_last: float | None = None
    eval_accuracy_before: float | None = None
    eval_accuracy_after: float | None = None
    eval_greedy_before: float | None = None
    eval_greedy_after: float | None = None
    eval_after_step: int | None = None
    """The model step of the `after` figures; None when nothing was evaluated after training."""
    eval_failed_prompts: int = 0
    """Of the last evaluation; they are in none of its figures."""
    error: str | None = None
    """Why the run stopped early."""
    train_seconds: float = 0.0
    """In train steps, evaluation not included."""
    eval_seconds: float = 0.0
    """In evaluations between two steps; one beside training takes no time of its own."""
    wall_seconds: float = 0.0
    """That a process worked on it."""
    began_at: float = 0.0
    """The wall clock's, in seconds since 1970."""
    effective_time_ratio: float | None = None
    """Seconds in steps that count, each once, and in evaluations, without those lost to recovery, over all since the
    run began: what was lost, the time between two processes and loading again are in the second only."""
    recovery_seconds: float | None = None
    """Of `train_seconds` and `eval_seconds`: when something that was lost was missing, or a step was made in vain."""
    actors_lost: int | None = None
    actor_seconds_lost: float | None = None
    """Added up over all actors that came back; others may have worked meanwhile."""
    hf_dir: str = ""


class SummarySink:
    """Keeps `summary` up to date. A run that goes on from a checkpoint goes on from its summary too."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.summary = Summary(began_at=time.time())
        self.last_metrics: dict[str, float] = {}
        """Of the last step."""
        self._counted = 0
        """The last step whose seconds are in. A step that is resumed from is told again."""
        self._clock = clock
        self._since = clock()
        self._step_since: float | None = None
        """When the step began that is under way."""
        self._eval_since: float | None = None
        """The same, of an evaluation beside which no step began."""
        self._recovery = Recovery(clock)

    def restart(self, saved: dict[str, Any], step: int) -> None:
        """`saved` is what `plain` gave when the checkpoint of `step` was written."""
        self._counted = saved["steps"]
        self.summary = msgspec.convert({**saved, "steps": step, "error": None, "interrupted": False}, Summary)

    def plain(self) -> dict[str, Any]:
        """As it stands now, for files."""
        now = self._clock()
        summary = self.summary
        if lost := self._recovery.settle(min([now, *filter(None, (self._step_since, self._eval_since))])):
            summary.recovery_seconds = (summary.recovery_seconds or 0.0) + lost
        summary.wall_seconds += now - self._since
        self._since = now
        summary.began_at = summary.began_at or time.time()
        if (seconds := time.time() - summary.began_at) > 0:
            useful = summary.train_seconds + summary.eval_seconds - (summary.recovery_seconds or 0.0)
            summary.effective_time_ratio = min(1.0, max(0.0, useful / seconds))
        plain: dict[str, Any] = msgspec.to_builtins(summary)
        return plain

    def notice(self, event: Event) -> None:
        summary = self.summary
        if isinstance(event, StepTrained):
            summary.steps, self.last_metrics = event.train_step, event.metrics
            if event.train_step > self._counted:
                self._counted = event.train_step
                summary.train_seconds += event.metrics.get("time/step_s", 0.0)
                if self._step_since is not None:
                    self._recovery.worked(self._step_since)
            summary.reward_last = event.metrics.get("reward/mean", summary.reward_last)
            if summary.reward_first is None:
                summary.reward_first = summary.reward_last
        elif isinstance(event, EvaluationDone):
            self._evaluated(event)
        elif isinstance(event, Exported):
            summary.hf_dir = event.directory
        elif isinstance(event, ActorLost | ActorRecovered | EngineChanged | StepGivenBack):
            self._missed(event)
        elif isinstance(event, StageBegan | StageEnded):
            self._timed(event)

    def close(self) -> None:
        """It is read after the run."""

    def _missed(self, event: ActorLost | ActorRecovered | EngineChanged | StepGivenBack) -> None:
        summary, recovery = self.summary, self._recovery
        match event:
            case ActorLost(actor=name):
                summary.actors_lost = (summary.actors_lost or 0) + 1
                recovery.lost(f"actor {name}")
            case ActorRecovered(actor=name, seconds=seconds):
                summary.actor_seconds_lost = (summary.actor_seconds_lost or 0.0) + seconds
                recovery.back(f"actor {name}")
            case EngineChanged(engine=name, state="fenced"):
                recovery.lost(f"engine {name}")
            case EngineChanged(engine=name, state="active"):
                recovery.back(f"engine {name}")
            case EngineChanged(engine=name, state="left"):
                recovery.forget(f"engine {name}")
            case StepGivenBack() if self._step_since is not None:
                recovery.in_vain(self._step_since)

    def _timed(self, event: StageBegan | StageEnded) -> None:
        """Counts evaluations during which no step begins."""
        if event.stage == "step":
            self._step_since = self._clock() if isinstance(event, StageBegan) else None
            self._eval_since = None
        elif event.stage == "eval":
            if isinstance(event, StageBegan):
                self._eval_since = self._clock() if self._step_since is None else None
            elif self._eval_since is not None:
                self.summary.eval_seconds += event.seconds
                self._recovery.worked(self._eval_since)
                self._eval_since = None

    def _evaluated(self, event: EvaluationDone) -> None:
        summary, metrics = self.summary, event.metrics
        accuracy, greedy = metrics.get("eval/accuracy"), metrics.get("eval/greedy_accuracy")
        failed = metrics.get("eval/failed_prompts", 0.0) + metrics.get("eval/greedy_failed_prompts", 0.0)
        summary.eval_failed_prompts = int(failed)
        if event.model_step == 0:
            summary.eval_accuracy_before, summary.eval_greedy_before = accuracy, greedy
        else:
            summary.eval_accuracy_after, summary.eval_greedy_after = accuracy, greedy
            summary.eval_after_step = event.model_step
