"""Trackers of other people's making, each behind an extra: Weights & Biases, trackio, MLflow, OpenTelemetry.

A service counts steps up only, and an evaluation beside training ends late; so each keeps evaluations apart, as
`eval/...` over the step of the weights that answered. A process of a run is a run of its own there: what was logged
before a resume stays.

    WandbTrackerConfig, TrackioTrackerConfig, MlflowTrackerConfig     metrics
    OpenTelemetryConfig                                               spans: `spans.py`
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from penstock.trainer.observers import Sink
from penstock.trainer.trackers import Kind, SinkConfig, Tracker, TrackerConfig


class WandbTrackerConfig(TrackerConfig):
    """Weights & Biases. Needs the extra `wandb`; credentials are wandb's own business."""

    project: str = "penstock"
    """Where the run appears."""
    offline: bool = False
    """Keep everything in the run directory; `wandb sync` sends it."""

    def problems(self) -> Iterator[str]:
        yield from _missing("wandb", extra="wandb")

    def build(self, run_dir: Path, *, run_name: str) -> Tracker:
        return WandbTracker(run_dir, project=self.project, run_name=run_name, offline=self.offline)


class TrackioTrackerConfig(TrackerConfig):
    """trackio, on this machine; `trackio show` opens its dashboard. Needs the extra `trackio`."""

    project: str = "penstock"
    """Where the run appears."""

    def problems(self) -> Iterator[str]:
        yield from _missing("trackio", extra="trackio")

    def build(self, run_dir: Path, *, run_name: str) -> Tracker:
        return TrackioTracker(project=self.project, run_name=run_name)


class MlflowTrackerConfig(TrackerConfig):
    """MLflow. Needs the extra `mlflow`; credentials of a server are MLflow's own business."""

    experiment: str = pydantic.Field(default="penstock", min_length=1)
    """Where the run appears."""
    tracking_uri: str | None = None
    """A server, as in `http://127.0.0.1:5000`, or a database. None: `mlflow.db` in the run directory."""

    def problems(self) -> Iterator[str]:
        yield from _missing("mlflow", extra="mlflow")

    def build(self, run_dir: Path, *, run_name: str) -> Tracker:
        uri = self.tracking_uri or f"sqlite:///{(run_dir / 'mlflow.db').resolve()}"
        return MlflowTracker(uri, experiment=self.experiment, run_name=run_name)


class OpenTelemetryConfig(SinkConfig):
    """Spans of every step and stage to a collector, by OTLP over HTTP. Needs the extra `otel`."""

    endpoint: str = pydantic.Field(default="http://127.0.0.1:4318/v1/traces", pattern="^https?://")
    """Of the collector."""
    headers: dict[str, pydantic.SecretStr] = {}
    """Sent with every request. Their values are in no file that a run writes."""
    service_name: str = pydantic.Field(default="penstock", min_length=1)
    """Under which the spans are found."""
    timeout_s: float = pydantic.Field(default=10.0, gt=0, allow_inf_nan=False)
    """For the collector to take what it is sent."""

    def problems(self) -> Iterator[str]:
        for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
            yield from _missing(package, extra="otel")

    def sink(self, run_dir: Path, *, run_name: str) -> Sink:
        from penstock.trainer.spans import Spans, otlp_provider

        headers = {name: value.get_secret_value() for name, value in self.headers.items()}
        provider = otlp_provider(self.endpoint, headers, service_name=self.service_name, timeout_s=self.timeout_s)
        return Spans(provider, run_name=run_name)


class WandbTracker:
    def __init__(self, run_dir: Path, *, project: str, run_name: str, offline: bool) -> None:
        import wandb

        # What is printed is the display's: wandb would put itself in between.
        self._run: Any = wandb.init(
            project=project,
            name=run_name,
            dir=str(run_dir),
            mode="offline" if offline else "online",
            settings={"console": "off"},
        )
        # Its own step only counts up, and drops what comes late; so every series names its axis.
        self._run.define_metric("*", step_metric="train_step")
        self._run.define_metric("eval/*", step_metric="eval/model_step")

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        self._run.log({"train_step" if kind == "train" else "eval/model_step": step, **metrics})

    def resume(self, step: int) -> None:
        """A process is a run of its own there; its steps go on."""

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    def __init__(self, *, project: str, run_name: str) -> None:
        import trackio

        # It prints, and the terminal is the display's.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run: Any = trackio.init(
                project=project, name=run_name, embed=False, auto_log_cpu=False, auto_log_gpu=False
            )

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        self._run.log(dict(metrics), step=step)

    def resume(self, step: int) -> None:
        """A process is a run of its own there; its steps go on."""

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


class MlflowTracker:
    """Its metrics are sent by a thread of MLflow's: a slow server does not hold a step up."""

    def __init__(self, uri: str, *, experiment: str, run_name: str) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        self._run_id = self._client.create_run(experiment_id, run_name=run_name).info.run_id
        self._sent: Any = None

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # A name may not have "@" there.
        values = [
            Metric(name.replace("@", "_at_"), value, now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        self._sent = self._client.log_batch(self._run_id, metrics=values, synchronous=False)

    def resume(self, step: int) -> None:
        """A process is a run of its own there; its steps go on."""

    def close(self) -> None:
        if self._sent is not None:
            self._sent.wait()
        self._client.set_terminated(self._run_id)


def _missing(package: str, *, extra: str) -> Iterator[str]:
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of what it lies in
        found = None
    if found is None:
        yield f"{package} is not installed; run `pip install penstock[{extra}]` or leave this tracker out"
