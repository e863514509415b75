"""Where a run's metrics go: here a JSONL file and TensorBoard events; `services.py` has the others. One `log` per step
and evaluation.

An evaluation beside training ends when later steps are already logged. Its metrics have the step of the weights that
answered, and series of their own (`eval/...`), so that no series goes back: in `metrics.jsonl` the lines stand in the
order of time and `kind` tells the two apart; TensorBoard has a step per series.
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from penstock.config import Config
from penstock.errors import StorageError
from penstock.events import EvaluationDone, Event, RunBegan, StepTrained
from penstock.trainer.metric_names import meaning
from penstock.trainer.observers import Sink

Kind = Literal["train", "eval"]


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        """Keep one step's or one evaluation's metrics; in the file when it returns.

        Raises StorageError when it could not be written; then the run goes on without this tracker.
        """
        ...

    def resume(self, step: int) -> None:
        """A run goes on from `step`: what was logged for it and for later steps no longer holds."""
        ...

    def close(self) -> None: ...


class SinkConfig(Config, abc.ABC):
    """Base of what is told everything that happens in a run; subclass it for one of your own."""

    @abc.abstractmethod
    def sink(self, run_dir: Path, *, run_name: str) -> Sink:
        """Raises StorageError to refuse the run; after anything else the run goes on without it."""


class TrackerConfig(SinkConfig):
    """Base of tracker configurations; subclass it for a tracker of your own."""

    @abc.abstractmethod
    def build(self, run_dir: Path, *, run_name: str) -> Tracker: ...

    def sink(self, run_dir: Path, *, run_name: str) -> Sink:
        return TrackerSink(self.build(run_dir, run_name=run_name))


class TrackerSink:
    """Tells a tracker of the steps and evaluations of a run."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def notice(self, event: Event) -> None:
        if isinstance(event, RunBegan) and event.resumed_from is not None:
            self._tracker.resume(event.resumed_from)
        elif isinstance(event, StepTrained):
            self._tracker.log(event.train_step, event.metrics, kind="train")
        elif isinstance(event, EvaluationDone):
            self._tracker.log(event.model_step, event.metrics, kind="eval")

    def close(self) -> None:
        self._tracker.close()


class JsonlTrackerConfig(TrackerConfig):
    """Lines in `metrics.jsonl`: {"step": 1, "kind": "train", "time": 1.7e9, "reward/mean": 0.25, ...}.

    `time` is the wall clock's. Not a number is written as null.
    """

    file: str = "metrics.jsonl"
    """In the run directory."""

    def problems(self) -> Iterator[str]:
        if Path(self.file).name != self.file:
            yield f"file is {self.file!r}; it must be a plain file name, it lies in the run directory"

    def build(self, run_dir: Path, *, run_name: str) -> Tracker:
        return JsonlTracker(run_dir / self.file)


class TensorBoardTrackerConfig(TrackerConfig):
    """Event files in `<run directory>/tensorboard`; look at them with `tensorboard --logdir runs`."""

    def build(self, run_dir: Path, *, run_name: str) -> Tracker:
        return TensorBoardTracker(run_dir / "tensorboard")


class JsonlTracker:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: after a failed write nothing is left over that closing would try to write again.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error}") from error

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        line = msgspec.json.encode({"step": step, "kind": kind, "time": round(time.time(), 3), **metrics}) + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise StorageError(f"step {step} could not be written to {self._path}: {error}") from error
        if written != len(line):
            raise StorageError(f"step {step} could not be written to {self._path}: the disk is full")

    def resume(self, step: int) -> None:
        try:
            kept = [line for line in self._path.read_bytes().splitlines(keepends=True) if _step_of(line) < step]
            replacement = self._path.with_name(f".{self._path.name}")
            replacement.write_bytes(b"".join(kept))
            self._file.close()
            replacement.replace(self._path)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be continued: {error}") from error

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Uses tensorboard's own event writer: it needs neither torch nor TensorFlow."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        self._directory = directory
        self._explained: set[str] = set()
        """Metrics whose meaning was written down; TensorBoard shows it beside the curve."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._writer: Any = EventFileWriter(str(directory))
        except OSError as error:
            raise StorageError(f"{directory} cannot be written: {error}") from error

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        values = [
            Summary.Value(tag=name, simple_value=value, metadata=self._explanation(name))
            for name, value in finite.items()
        ]
        try:
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            self._writer.flush()
        except OSError as error:
            raise StorageError(f"step {step} could not be written to {self._directory}: {error}") from error

    def _explanation(self, name: str) -> Any:
        """What a metric means, the first time that it is written."""
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata

        if name in self._explained or (text := meaning(name)) is None:
            return None
        self._explained.add(name)
        return SummaryMetadata(summary_description=text)

    def resume(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # TensorBoard drops what an earlier session logged from this step on.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))

    def close(self) -> None:
        self._writer.close()


def _step_of(line: bytes) -> float:
    """Of one logged line; a torn one, which a kill left, counts as later than any."""
    try:
        return float(msgspec.json.decode(line)["step"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return math.inf
