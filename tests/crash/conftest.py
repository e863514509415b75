"""Real runs, small enough to be run often."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.config_file import load_config
from penstock.events import Event, Note
from penstock.models import set_cache_directory
from penstock.testing.faults import Faults, FaultyDisk, FaultyFiles

SMALL = ["evaluator=null", "train_batch_size=4", "checkpoint_interval=2", "cpu_threads=1"]


@pytest.fixture(scope="session", autouse=True)
def _use_model_cache(model_cache):
    set_cache_directory(model_cache)
    yield
    set_cache_directory(None)


class Said:
    """A sink that remembers the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def notice(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)

    def close(self) -> None:
        pass


@pytest.fixture
def said():
    return Said()


@pytest.fixture(scope="session")
def build(model_cache):
    """A trainer of a recipe in this process, with faults if there are to be any."""

    def build(recipe: str, run_dir: Path, *, steps: int = 6, sink: Any = None, **faults: Faults) -> Any:
        from penstock.trainer.colocate import RLColocateTrainer
        from penstock.trainer.disaggregated import RLDisaggregatedTrainer
        from penstock.trainer.observers import Observers
        from penstock.trainer.parts import build_trainer

        settings = [*SMALL, f"total_steps={steps}", "engines.engine.process=false"]
        return build_trainer(
            load_config(recipe, settings),
            RLColocateTrainer if recipe == "tiny" else RLDisaggregatedTrainer,
            run_dir,
            Observers(sink=sink) if sink is not None else None,
            "auto",
            disk=FaultyDisk(faults["ledger"]) if "ledger" in faults else None,
            files=FaultyFiles(faults["files"]) if "files" in faults else None,
        )

    return build


@pytest.fixture
def penstock(model_cache, tmp_path):
    """Start the command; returns the process. `cwd` is the test's directory."""
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PENSTOCK_HOME": str(model_cache.parent), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def wait_for():
    """Wait until something is so; the process must not end before."""

    def wait(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return wait


@pytest.fixture
def small():
    """The settings of a small run, for the command."""

    def settings(steps: int) -> list[str]:
        return [word for setting in [*SMALL, f"total_steps={steps}"] for word in ("--set", setting)]

    return settings
