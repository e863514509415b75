"""Every command that a document shows is run here, or stands in `doc_commands.py` with the reason why not."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from doc_commands import COMMANDS, ROOT, LeftOut, Played, Served, all_shown

from penstock.cli import main

PLAYED = {command: how for command, how in COMMANDS.items() if isinstance(how, Played)}
SERVED = {command: how for command, how in COMMANDS.items() if isinstance(how, Served)}
END_S = 60


def test_every_command_is_in_the_list_and_every_listed_one_in_a_document() -> None:
    assert all_shown() == set(COMMANDS)


def test_what_is_left_out_says_why_and_names_tests_that_there_are() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    left_out = [how for how in COMMANDS.values() if isinstance(how, LeftOut)]
    assert all(how.why for how in left_out)
    assert [how.by for how in left_out if how.by and f"def {how.by}(" not in tests] == []


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Path]:
    """A directory in which the commands are given one after the other, as a reader would."""
    directory = tmp_path_factory.mktemp("reader")
    with contextlib.chdir(directory), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(model_cache.parent))
        yield directory


@pytest.mark.parametrize("command", PLAYED)
def test_the_command_does_what_the_document_says(
    command: str, workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    how = PLAYED[command]
    _stand_in(workspace)
    code = main([*shlex.split(command)[1:], *how.added])
    said = capfd.readouterr()
    assert code == 0, said.err
    assert how.says in said.out
    assert not how.makes or (workspace / how.makes).is_file()


def test_the_demo_ends_with_its_picture_and_the_line_for_the_page(
    workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [recipe] = re.findall(r"^demo:.*\n\t(.*)\n(?!\t)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe == "$(BIN)/penstock train quickstart --curve"
    command = recipe.replace("quickstart", "tiny --run-dir runs/demo")
    assert main([*shlex.split(command)[1:], "--set", "total_steps=1", "--set", "evaluator.eval_sample_num=4"]) == 0
    assert capfd.readouterr().out.splitlines()[-2:] == [
        "The curves: runs/demo/curve.png",
        "Look at it with: penstock view runs/demo",
    ]
    assert (workspace / "runs/demo/curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", SERVED)
def test_the_command_serves_until_it_is_ended(command: str, workspace: Path) -> None:
    _stand_in(workspace)
    how = SERVED[command]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *shlex.split(command)[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    deadline = threading.Timer(END_S, process.kill)
    deadline.start()
    try:
        said = ""
        for line in process.stdout:
            said += line
            if how.says in line:
                break
        assert how.says in said
        address = re.search(r"http://127\.0\.0\.1:\d+\S*", said)
        assert address is not None
        # 401 is an answer too: that of who has no key.
        assert httpx.get(address.group(), follow_redirects=False, timeout=END_S).status_code in (200, 307, 401, 404)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_S)
        assert process.returncode in (0, 130, -signal.SIGINT)
    finally:
        deadline.cancel()
        process.kill()
        process.wait()


def _stand_in(workspace: Path) -> None:
    """What `quickstart` leaves after minutes has the same files as what `tiny` leaves after seconds."""
    tiny, quickstart = workspace / "runs" / "tiny", workspace / "runs" / "quickstart"
    if (tiny / "summary.json").exists() and not quickstart.exists():
        shutil.copytree(tiny, quickstart)
