"""Engines that a user adds and takes away while a real run is under way."""

from __future__ import annotations

import signal
import time

import pytest

from penstock.events import EngineChanged
from penstock.testing.ledger_history import check_ledger
from penstock.trainer.observers import read_events


@pytest.mark.long_tier
def test_engines_join_and_leave_a_disaggregated_run_and_nothing_is_lost(penstock, tmp_path, read_lines):
    command = ["train", "tiny-async", "--run-dir", "run", "--set", "evaluator=null", "--set", "checkpoint_interval=2"]
    command += ["--set", "train_batch_size=4"]
    run = penstock(*command, "--set", "total_steps=100000")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def steps() -> int:
        return metrics.read_text().count("reward/mean") if metrics.exists() else 0

    def wait_for(step: int) -> None:
        deadline = time.monotonic() + 120
        while steps() < step:
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def engines(*arguments: str) -> str:
        asking = penstock("engines", "run", *arguments)
        output, _ = asking.communicate(timeout=120)
        assert asking.returncode == 0, output
        return output

    wait_for(2)
    assert engines().startswith("engine-0  active")
    assert engines("add").startswith("engine-1 serves\n")
    wait_for(steps() + 3)
    assert engines("drain", "engine-0").startswith("engine-0 has left\n")
    wait_for(steps() + 3)
    listed = engines()
    assert "engine-0" not in listed and listed.startswith("engine-1  active")
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 0, output

    events = [kept.event for kept in read_events(tmp_path / "run" / "events.jsonl")]
    changes = [(event.engine, event.state) for event in events if isinstance(event, EngineChanged)]
    assert changes[:5] == [
        ("engine-0", "active"),
        ("engine-1", "recovering"),
        ("engine-1", "active"),
        ("engine-0", "draining"),
        ("engine-0", "left"),
    ]
    done = len(read_lines(metrics))
    resumed = penstock(*command, "--resume", "--set", f"total_steps={done + 2}")
    output, _ = resumed.communicate(timeout=150)
    assert resumed.returncode == 0, output
    assert [line["step"] for line in read_lines(metrics)] == list(range(1, done + 3))
    check_ledger(tmp_path / "run").require_none()
