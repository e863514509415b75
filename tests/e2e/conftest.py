"""Real runs of the tiny model."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_commands import Command, Commands

from penstock.models import set_cache_directory


@pytest.fixture(autouse=True)
def _use_model_cache(model_cache, make_known):
    make_known("tiny")
    set_cache_directory(model_cache)
    yield
    set_cache_directory(None)


@pytest.fixture
def tiny_chat(make_known):
    return make_known("tiny-chat")


@pytest.fixture(scope="session")
def commands():
    commands = Commands()
    yield commands
    commands.close()


@pytest.fixture
def penstock(commands, model_cache, tmp_path):
    """Start the command in a directory of its own; returns the process. None outlives its test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Command:
            environment = os.environ | {"PENSTOCK_HOME": str(model_cache.parent)}
            return stack.enter_context(
                contextlib.closing(commands.start(*arguments, cwd=tmp_path, environment=environment))
            )

        yield start


@pytest.fixture(scope="session")
def tiny_run(model_cache, make_known, size):
    """The run directory of `penstock train tiny`, as a shell starts it: run once, for all test processes.

    On one thread: the other cores have tests. In `make test` 30 of its 50 steps, in which it learns as much.
    """
    make_known("tiny")
    settings = (f"--set=total_steps={size(30, 50)}", "--set=cpu_threads=1")
    home = model_cache.parent
    with (home / "tiny_run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "run" / "summary.json").exists():
            run = subprocess.run(
                [sys.executable, "-m", "penstock.cli", "train", "tiny", "--run-dir", "run", *settings],
                cwd=home,
                env=os.environ | {"PENSTOCK_HOME": str(home)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=240,
            )
            assert run.returncode == 0, run.stdout
    return home / "run"


@pytest.fixture
def read_lines():
    def read(path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    return read
