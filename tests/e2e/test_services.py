"""Services that fail, in a real run."""

from __future__ import annotations

import json

import pytest

from penstock.cli import main
from penstock.events import Warned
from penstock.trainer.observers import read_events

RUN_FILE = """
from penstock import JsonlTrackerConfig, SinkConfig
from penstock.recipes.tiny import trainer as tiny


class NobodyThere(SinkConfig):
    def sink(self, run_dir, *, run_name):
        raise ConnectionError("no route to the service")


class Fails:
    def notice(self, event):
        raise TimeoutError("the service is gone")

    def close(self):
        pass


class GoesAway(SinkConfig):
    def sink(self, run_dir, *, run_name):
        return Fails()


trainer = tiny.replace("trackers", [NobodyThere(), GoesAway(), JsonlTrackerConfig()])
"""


@pytest.mark.long_tier
def test_a_service_that_cannot_be_reached_or_goes_away_never_ends_a_run(tmp_path, monkeypatch, model_cache):
    monkeypatch.setenv("PENSTOCK_HOME", str(model_cache.parent))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "watched.py").write_text(RUN_FILE)
    assert main(["train", "watched.py", "--set", "total_steps=1", "--set", "evaluator=null"]) == 0
    run = tmp_path / "runs" / "watched"
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1
    events = [kept.event for kept in read_events(run / "events.jsonl")]
    told = [event.text for event in events if isinstance(event, Warned)]
    assert "tracker 0 (NobodyThere) cannot be used; the run goes on without it. ConnectionError: no route" in told[0]
    assert told[1].startswith("tracker 1 (GoesAway) failed and is told nothing more; the run goes on.")
