"""Real runs of the tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.models import set_cache_directory


@pytest.fixture(autouse=True)
def _use_model_cache(model_cache):
    set_cache_directory(model_cache)
    yield
    set_cache_directory(None)


def start_penstock(model_cache: Path, cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *arguments],
        cwd=cwd,
        env=os.environ | {"PENSTOCK_HOME": str(model_cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def penstock(model_cache, tmp_path):
    """Start the command in a directory of its own; returns the process. None outlives its test."""
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(start_penstock(model_cache, tmp_path, *arguments))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="session")
def tiny_run(model_cache, tmp_path_factory):
    """The run directory of `penstock train tiny`, run once."""
    directory = tmp_path_factory.mktemp("tiny")
    run = start_penstock(model_cache, directory, "train", "tiny", "--run-dir", "run")
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    return directory / "run"


@pytest.fixture
def read_lines():
    def read(path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    return read
