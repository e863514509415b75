from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

from penstock.errors import ConfigError, StorageError
from penstock.trainer.trackers import JsonlTrackerConfig, TensorBoardTrackerConfig, WandbTrackerConfig


def test_each_step_is_one_json_line_on_disk_when_log_returns(tmp_path: Path) -> None:
    tracker = JsonlTrackerConfig().build(tmp_path / "run", run_name="run")
    tracker.log(1, {"reward/mean": 0.25})
    file = tmp_path / "run" / "metrics.jsonl"
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"step": 1, "reward/mean": 0.25}]
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
    assert len(file.read_text().splitlines()) == 2


def test_a_value_that_is_no_number_is_null_and_the_line_stays_json(tmp_path: Path) -> None:
    tracker = JsonlTrackerConfig().build(tmp_path, run_name="run")
    tracker.log(1, {"a": math.nan, "b": math.inf})
    tracker.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": None, "b": None}


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


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_whose_package_is_missing_is_refused_with_the_command_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install penstock\[wandb\]"):
        WandbTrackerConfig().check()
