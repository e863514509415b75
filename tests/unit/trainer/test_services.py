"""Trackers of other people's making. Those whose package is here are really used."""

from __future__ import annotations

import http.server
import importlib.util
import json
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.events import (
    EvaluationDone,
    RunEnded,
    StageBegan,
    StageEnded,
    StepTrained,
    Warned,
    WeightsPublished,
)
from penstock.trainer.services import (
    MlflowTrackerConfig,
    OpenTelemetryConfig,
    TrackioTrackerConfig,
    WandbTrackerConfig,
)
from penstock.trainer.trackers import SinkConfig, Tracker, TrackerSink

SERVICES: dict[str, SinkConfig] = {
    "wandb": WandbTrackerConfig(),
    "trackio": TrackioTrackerConfig(),
    "mlflow": MlflowTrackerConfig(),
    "otel": OpenTelemetryConfig(),
}
NEEDS = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow", "otel": "opentelemetry.sdk"}


def is_here(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def needs(extra: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_here(NEEDS[extra]), reason=f"the extra {extra} is not installed")


@pytest.mark.parametrize("extra", SERVICES)
def test_a_tracker_whose_package_is_missing_is_refused_with_the_command_to_install_it(extra: str) -> None:
    if is_here(NEEDS[extra]):
        SERVICES[extra].check()
    else:
        with pytest.raises(ConfigError, match=rf"is not installed; run `pip install penstock\[{extra}\]`"):
            SERVICES[extra].check()


def late_evaluation(tracker: Tracker) -> None:
    """The evaluation of model step 1 ends after step 2."""
    sink = TrackerSink(tracker)
    sink.notice(StepTrained(train_step=1, metrics={"reward/mean": 0.1}))
    sink.notice(StepTrained(train_step=2, metrics={"reward/mean": 0.2}))
    sink.notice(EvaluationDone(model_step=1, metrics={"eval/accuracy": 0.5, "eval/pass@4": 0.75}))
    sink.notice(StepTrained(train_step=3, metrics={"reward/mean": 0.3}))
    sink.notice(EvaluationDone(model_step=3, metrics={"eval/accuracy": 0.6}))
    sink.close()


class CountingUp:
    """As Weights & Biases has it: one step that only counts up, and series over an axis of their own choice."""

    def __init__(self) -> None:
        self.axes: dict[str, str] = {}
        self.rows: list[dict[str, Any]] = []

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, Any], step: int | None = None) -> None:
        assert step is None or step >= len(self.rows), "dropped: steps must not go back"
        self.rows.append(row)

    def finish(self) -> None:
        pass


def test_weights_and_biases_gets_an_axis_for_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CountingUp()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: run))
    late_evaluation(WandbTrackerConfig().build(tmp_path, run_name="run"))
    assert run.axes == {"*": "train_step", "eval/*": "eval/model_step"}
    assert [row["eval/model_step"] for row in run.rows if "eval/accuracy" in row] == [1, 3]
    assert [row["train_step"] for row in run.rows if "reward/mean" in row] == [1, 2, 3]


@needs("wandb")
@pytest.mark.filterwarnings("default")
def test_weights_and_biases_offline_leaves_what_can_be_sent_later(tmp_path: Path) -> None:
    import wandb  # type: ignore[import-not-found,unused-ignore]

    late_evaluation(WandbTrackerConfig(offline=True).build(tmp_path, run_name="run"))
    wandb.teardown()  # as at the end of a process: its service has written everything then
    [record] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = record.read_bytes()
    assert b"reward/mean" in written and b"eval/accuracy" in written


@needs("trackio")
@pytest.mark.filterwarnings("default")
def test_trackio_has_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio.utils")

    for module in [module for name, module in sys.modules.items() if name.startswith("trackio")]:
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    late_evaluation(TrackioTrackerConfig(project="made").build(tmp_path, run_name="run"))
    with sqlite3.connect(tmp_path / "made.db") as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    assert [step for step, metrics in rows if "reward/mean" in json.loads(metrics)] == [1, 2, 3]
    assert [step for step, metrics in rows if "eval/accuracy" in json.loads(metrics)] == [1, 3]
    assert capsys.readouterr().out == ""


@needs("mlflow")
@pytest.mark.filterwarnings("default")
def test_mlflow_has_every_step_and_that_the_run_ended(tmp_path: Path) -> None:
    from mlflow import MlflowClient  # type: ignore[import-not-found,unused-ignore]

    late_evaluation(MlflowTrackerConfig(experiment="made").build(tmp_path, run_name="run"))
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("made").experiment_id])
    history = client.get_metric_history
    assert sorted(point.step for point in history(run.info.run_id, "reward/mean")) == [1, 2, 3]
    assert sorted(point.step for point in history(run.info.run_id, "eval/accuracy")) == [1, 3]
    assert run.data.metrics["eval/pass_at_4"] == 0.75 and run.info.status == "FINISHED"


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an exporter sends."""

    taken: list[tuple[str, bytes, str | None]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.taken.append((self.path, body, self.headers.get("X-Key")))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[http.server.ThreadingHTTPServer]:
    handler = type("OneCollector", (Collector,), {"taken": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def a_step(sink: Any) -> None:
    sink.notice(StageBegan(stage="load", detail="libraries"))
    sink.notice(StageBegan(stage="step", train_step=1))
    for stage in ("produce", "train"):
        sink.notice(StageBegan(stage=stage, train_step=1))
        sink.notice(StageEnded(stage=stage, train_step=1, seconds=0.1))
    sink.notice(StageBegan(stage="eval", lane="evaluation"))
    sink.notice(WeightsPublished(model_step=1, num_bytes=7, seconds=0.1))
    sink.notice(Warned(text="something odd"))
    sink.notice(StepTrained(train_step=1, metrics={"reward/mean": 0.5}))
    sink.notice(StageEnded(stage="step", train_step=1, seconds=0.3))
    sink.notice(StageBegan(stage="step", train_step=2))
    sink.notice(StageBegan(stage="train", train_step=2))
    sink.notice(RunEnded(steps=1, error="the disk is full"))


@needs("otel")
@pytest.mark.filterwarnings("default")
def test_a_step_is_a_trace_its_stages_are_spans_and_what_happened_are_their_events() -> None:
    from opentelemetry.sdk.trace import TracerProvider  # type: ignore[import-not-found,unused-ignore]
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # type: ignore[import-not-found,unused-ignore]
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # type: ignore[import-not-found,unused-ignore]
        InMemorySpanExporter,
    )

    from penstock.trainer.spans import Spans

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    a_step(Spans(provider, run_name="run"))
    spans = kept.get_finished_spans()
    assert [span.name for span in spans] == ["produce", "train", "step", "train", "step", "eval"]
    produce, train, step, _, broken, evaluation = spans
    assert produce.parent.span_id == train.parent.span_id == step.context.span_id and step.parent is None
    assert evaluation.parent is None and broken.context.trace_id != step.context.trace_id
    assert step.attributes["reward/mean"] == 0.5 and step.attributes["penstock.train_step"] == 1
    assert [event.name for event in step.events] == ["weights_published", "warned"]
    assert broken.status.description == "the disk is full"


@needs("otel")
@pytest.mark.filterwarnings("default")
def test_spans_reach_a_collector(tmp_path: Path, collector: http.server.ThreadingHTTPServer) -> None:
    address = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
    sink = OpenTelemetryConfig(endpoint=address, headers={"X-Key": "k"}).sink(tmp_path, run_name="run")
    a_step(sink)
    sink.close()
    taken = collector.RequestHandlerClass.taken  # type: ignore[attr-defined]
    assert {path for path, _, _ in taken} == {"/v1/traces"} and {key for _, _, key in taken} == {"k"}
    assert b"reward/mean" in b"".join(body for _, body, _ in taken)


@needs("otel")
@pytest.mark.filterwarnings("default")
def test_a_collector_that_is_not_there_costs_nothing_but_the_spans(tmp_path: Path) -> None:
    sink = OpenTelemetryConfig(endpoint="http://127.0.0.1:9/v1/traces", timeout_s=0.5).sink(tmp_path, run_name="run")
    a_step(sink)
    sink.close()
