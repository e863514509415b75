"""`tiny-ray` with a reward that can be held back: what is done to its parts meanwhile comes in the middle of a step."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

CONFIG = """
import time
from pathlib import Path

from penstock import exact_match
from penstock.recipes.tiny_ray import trainer as tiny


def patient(response, label, extra_info):
    while Path("{hold}").exists():
        Path("{hold}.held").touch()
        time.sleep(0.02)
    return exact_match(response, label, extra_info)


trainer = tiny
for task in ("manager.tasks.0", "evaluator.tasks.0"):
    trainer = trainer.replace(task + ".judger_config.reward_handler", patient)
"""
Begin = Callable[..., tuple[subprocess.Popen[str], Path]]


@pytest.fixture(scope="module")
def hold(tmp_path_factory) -> Path:
    """While this file exists nothing is judged, and so no step ends. Who waits for that makes another beside it."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def begin(start, hold) -> Begin:
    config = hold.with_name("tiny_that_waits.py")
    config.write_text(CONFIG.format(hold=hold))

    def begin(*arguments: str, directory: Path | None = None) -> tuple[subprocess.Popen[str], Path]:
        hold.unlink(missing_ok=True)  # of a test that failed
        return start("train", str(config), *arguments, directory=directory)

    return begin


def hold_back(process: subprocess.Popen[str], hold: Path) -> None:
    """Returns when the run waits in the middle of a step, until `hold` is gone."""
    held = Path(f"{hold}.held")
    held.unlink(missing_ok=True)
    hold.touch()
    deadline = time.monotonic() + 200
    while not held.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
