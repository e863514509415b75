"""A run file in a directory of its own: its neighbours can be imported, and nothing in it stands in for a library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

RUN_FILE = """\
import neighbour
from penstock.recipes.tiny import trainer as base


def reward(response, label, extra_info):
    import json
    import statistics

    return statistics.mean([json.loads("1"), neighbour.ONE])


trainer = base.replace("manager.tasks.0.judger_config", reward)
"""

DRIVER = """\
import asyncio, sys
from penstock.cli.config_file import load_config
from penstock.rollout import new_rollout

config = load_config(sys.argv[1])
judger = config.manager.task_list[0].judger.replace("timeout_s", 20.0).build()
print(asyncio.run(judger.judge(new_rollout("question"))))
asyncio.run(judger.close())

import colorsys, json, statistics

print(colorsys.rgb_to_hsv(0, 0, 0), json.dumps(1), statistics.mean([1]))
if "torch" in sys.argv:
    import torch

    print(torch.tensor(1).item())
"""
SAID = ["Verdict(score=1.0, parts={}, text=None)", "(0.0, 0.0, 0) 1 1"]


def load_in_another_process(name: str, directory: Path, *libraries: str) -> str:
    command = [sys.executable, "-P", "-c", DRIVER, name, *libraries]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["json.py", "torch.py", "colorsys.py", "run-1.py", "my_run.py"])
def test_a_run_file_may_have_the_name_of_a_library(tmp_path, name):
    (tmp_path / name).write_text(RUN_FILE)
    (tmp_path / "neighbour.py").write_text("ONE = 1\n")
    libraries = ["torch"] if name == "torch.py" else []  # its import takes longer than all the rest
    said = load_in_another_process(name, tmp_path, *libraries)
    assert said.splitlines() == [
        "Verdict(score=1.0, parts={}, text=None)",
        "(0.0, 0.0, 0) 1 1",
        *("1" for _ in libraries),
    ]


def test_a_neighbour_of_the_run_file_does_not_stand_in_for_a_library(tmp_path):
    (tmp_path / "run.py").write_text(RUN_FILE)
    (tmp_path / "neighbour.py").write_text("ONE = 1\n")
    for name in ("torch.py", "statistics.py", "colorsys.py"):
        (tmp_path / name).write_text("raise RuntimeError('not this one')\n")
    said = load_in_another_process("run.py", tmp_path, "torch")
    assert said.splitlines() == [*SAID, "1"]


CHILD = """\
import socket, subprocess, sys
from penstock.child import child_command

ours, theirs = socket.socketpair()
command = child_command("shown", sys.executable, theirs)
print(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout, end="")
"""


def test_nothing_in_the_working_directory_stands_in_for_a_library_of_the_command(tmp_path):
    (tmp_path / "run.py").write_text(RUN_FILE)
    (tmp_path / "neighbour.py").write_text("ONE = 1\n")
    for name in ("json.py", "argparse.py", "asyncio.py", "msgspec.py", "pydantic.py", "torch.py", "shlex.py"):
        (tmp_path / name).write_text("raise RuntimeError('not this one')\n")
    # Refused for its own reason, after everything that a command imports first.
    command = [sys.executable, "-m", "penstock.cli", "train", "run.py", "--set", "total_steps=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "total_steps is 0" in done.stderr


def test_nothing_in_the_working_directory_stands_in_for_a_library_of_a_child_process(tmp_path):
    (tmp_path / "shown.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]), __name__)\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')\n")
    done = subprocess.run([sys.executable, "-P", "-c", CHILD], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    arguments, name = done.stdout.rsplit(" ", 1)
    assert (len(ast.literal_eval(arguments)), name) == (2, "__main__\n")
