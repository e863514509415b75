"""Real runs whose engines are taken away, or do not take new weights."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time

import pytest
from engine_processes import engines_of

from penstock.cli.config_file import load_config
from penstock.errors import WeightSyncError
from penstock.events import EngineChanged
from penstock.models import resolve_model
from penstock.testing.ledger_history import check_ledger
from penstock.trainer.observers import read_events


@pytest.mark.long_tier
def test_when_no_engine_can_come_back_the_run_stops_names_them_and_resumes_with_nothing_lost(
    penstock, tmp_path, read_lines
):
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    weights = model / "model.safetensors"
    command = ["train", "tiny-async", "--run-dir", "run", "--set", f"model={model}", "--set", "evaluator=null"]
    command += ["--set", "engines.num_engines=2", "--set", "checkpoint_interval=2"]
    command += ["--set", "train_batch_size=4"]
    run = penstock(*command, "--set", "total_steps=100000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("reward/mean") >= 3):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)

    # Neither can be started again.
    weights.rename(tmp_path / "taken away")
    weights.write_bytes(b"nothing")
    engines = engines_of(run.pid)
    assert len(engines) == 2
    killed = time.monotonic()
    for engine in engines:
        os.kill(engine, signal.SIGKILL)
    output, _ = run.communicate(timeout=100)
    assert time.monotonic() - killed < 60
    assert run.returncode == 1, output
    error = json.loads((tmp_path / "run" / "summary.json").read_text())["error"]
    for text in (output, error):
        for name in ("engine-0", "engine-1"):
            assert f"{name} is fenced: the model in {model} cannot be loaded" in text

    (tmp_path / "taken away").rename(weights)
    done = len([line for line in read_lines(metrics) if "reward/mean" in line])
    resumed = penstock(*command, "--resume", "--set", f"total_steps={done + 3}")
    output, _ = resumed.communicate(timeout=150)
    assert resumed.returncode == 0, output
    assert [line["step"] for line in read_lines(metrics)] == list(range(1, done + 4))
    check_ledger(tmp_path / "run").require_none()


class BadChannel:
    """A weight channel whose source loses its first tensor from some model step on."""

    def __init__(self, inner, source, first_bad):
        self._inner = inner
        self._source = source
        self._first_bad = first_bad

    async def publish(self, model_step):
        self._source.broken = model_step >= self._first_bad
        return await self._inner.publish(model_step)

    async def close(self):
        await self._inner.close()


class LosesATensor:
    """The trainer's weights; when broken, without the first of them."""

    def __init__(self, source):
        self._source = source
        self.broken = False

    def tensors(self):
        return iter(list(self._source.tensors())[1 if self.broken else 0 :])


@pytest.mark.long_tier
def test_weights_that_no_engine_takes_stop_the_run_and_the_model_step_stays(tmp_path, read_lines):
    config = load_config("tiny-async", ["evaluator=null", "total_steps=6", "train_batch_size=4", "cpu_threads=2"])
    run_dir = tmp_path / "run"
    trainer = config.build(run_dir=run_dir)
    asyncio.run(trainer.parts.channel.close())
    source = LosesATensor(trainer.parts.worker.weights)
    channel = config.engines.build_channel(source, trainer.parts.engine, run_dir=run_dir, timeout_s=60)
    trainer.parts.channel = BadChannel(channel, source, first_bad=3)
    with pytest.raises(
        WeightSyncError, match=r"weights 3: no engine confirmed them\. engine-0: .*the old ones are kept"
    ):
        trainer.fit()
    assert trainer.parts.manager.model_step == 2
    assert "weights 3" in json.loads((run_dir / "summary.json").read_text())["error"]

    config.build(run_dir=run_dir, resume="auto").fit()
    assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    newest = [
        run[0] for row in read_lines(run_dir / "trajectories" / "step-000006.jsonl") for run in row["model_steps"]
    ]
    assert max(newest) <= 5
    check_ledger(run_dir).require_none()


@pytest.mark.long_tier
def test_a_colocated_engine_process_that_is_killed_comes_back_and_the_run_ends_as_usual(penstock, tmp_path, read_lines):
    settings = ["evaluator=null", "total_steps=12", "train_batch_size=4", "engines.engine.process=true"]
    run = penstock("train", "tiny", "--run-dir", "run", *(f"--set={setting}" for setting in settings))
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("reward/mean") >= 2):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (engine,) = engines_of(run.pid)
    os.kill(engine, signal.SIGKILL)
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert [line["step"] for line in read_lines(metrics)] == list(range(1, 13))
    events = [kept.event for kept in read_events(tmp_path / "run" / "events.jsonl")]
    states = [event.state for event in events if isinstance(event, EngineChanged)]
    assert "active" in states[states.index("fenced") :]
    check_ledger(tmp_path / "run").require_none()
