from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from penstock.errors import ConfigError, StorageError
from penstock.events import EvaluationDone, RunBegan, StepTrained
from penstock.trainer.trackers import (
    JsonlTrackerConfig,
    TensorBoardTrackerConfig,
    Tracker,
    TrackerSink,
)


def test_each_step_is_one_json_line_on_disk_when_log_returns(tmp_path: Path) -> None:
    tracker = JsonlTrackerConfig().build(tmp_path / "run", run_name="run")
    tracker.log(1, {"reward/mean": 0.25})
    file = tmp_path / "run" / "metrics.jsonl"
    [line] = [json.loads(line) for line in file.read_text().splitlines()]
    assert line.pop("time") == pytest.approx(time.time(), abs=60)
    assert line == {"step": 1, "kind": "train", "reward/mean": 0.25}
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
    assert len(file.read_text().splitlines()) == 2


def test_a_value_that_is_no_number_is_null_and_the_line_stays_json(tmp_path: Path) -> None:
    tracker = JsonlTrackerConfig().build(tmp_path, run_name="run")
    tracker.log(1, {"a": math.nan, "b": math.inf})
    tracker.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["step"] == 1 and line["a"] is None and line["b"] is None


def test_a_second_tracker_on_the_same_file_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = JsonlTrackerConfig().build(tmp_path, run_name="run")
        tracker.log(step, {})
        tracker.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_stops_the_run_with_the_file_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = JsonlTrackerConfig().build(tmp_path, run_name="run")
    with pytest.raises(StorageError, match=r"step 1 could not be written to .*metrics\.jsonl"):
        tracker.log(1, {"a": 1.0})
    tracker.close()


def test_a_tracker_that_cannot_open_its_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file, not a directory")
    for config in (JsonlTrackerConfig(), TensorBoardTrackerConfig()):
        with pytest.raises(StorageError, match="run"):
            config.build(tmp_path / "run", run_name="run")


def test_a_metrics_file_outside_the_run_directory_is_refused() -> None:
    with pytest.raises(ConfigError, match="plain file name"):
        JsonlTrackerConfig(file="../metrics.jsonl").check()


def test_tensorboard_events_can_be_read_back_with_their_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    tracker = TensorBoardTrackerConfig().build(tmp_path, run_name="run")
    tracker.log(1, {"reward/mean": 0.25, "bad": math.nan})
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
    [file] = (tmp_path / "tensorboard").iterdir()
    events = [event for event in LegacyEventFileLoader(str(file)).Load() if event.HasField("summary")]
    read = [(event.step, [(value.tag, value.simple_value) for value in event.summary.value]) for event in events]
    assert read == [(1, [("reward/mean", 0.25)]), (2, [("reward/mean", 0.5)])]
    said = [value.metadata.summary_description for event in events for value in event.summary.value]
    assert said == ["of all rollouts of the batch", ""]


def late_evaluation(tracker: Tracker) -> None:
    """The evaluation of model step 1 ends after step 2."""
    sink = TrackerSink(tracker)
    sink.notice(StepTrained(train_step=1, metrics={"reward/mean": 0.1}))
    sink.notice(StepTrained(train_step=2, metrics={"reward/mean": 0.2}))
    sink.notice(EvaluationDone(model_step=1, metrics={"eval/accuracy": 0.5}))
    sink.notice(StepTrained(train_step=3, metrics={"reward/mean": 0.3}))
    sink.notice(EvaluationDone(model_step=3, metrics={"eval/accuracy": 0.6}))
    sink.close()


def test_a_late_evaluation_is_a_line_of_its_kind_and_the_lines_are_in_the_order_of_time(tmp_path: Path) -> None:
    late_evaluation(JsonlTrackerConfig().build(tmp_path, run_name="run"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [(line["kind"], line["step"]) for line in lines]
    assert told == [("train", 1), ("train", 2), ("eval", 1), ("train", 3), ("eval", 3)]
    times = [line["time"] for line in lines]
    assert times == sorted(times)


def test_no_series_of_tensorboard_goes_back_and_none_is_dropped(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    late_evaluation(TensorBoardTrackerConfig().build(tmp_path, run_name="run"))
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    series = {tag: [event.step for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert series == {"reward/mean": [1, 2, 3], "eval/accuracy": [1, 3]}


def test_a_resumed_run_continues_without_duplicates(tmp_path: Path) -> None:
    late_evaluation(JsonlTrackerConfig().build(tmp_path, run_name="run"))
    sink = TrackerSink(JsonlTrackerConfig().build(tmp_path, run_name="run"))
    sink.notice(RunBegan(run_name="run", model="tiny", total_steps=4, resumed_from=2))
    for step in (2, 3):
        sink.notice(StepTrained(train_step=step, metrics={}))
    sink.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("train", 1), ("eval", 1), ("train", 2), ("train", 3)]
