"""Which directory a run is kept in, and what a resume takes from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_command import fails

from penstock.cli import main
from penstock.cli.command_file import joined, remembered_settings
from penstock.cli.run_directory import newest, next_free
from penstock.errors import ConfigError


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_every_run_has_a_directory_of_its_own(folder: Path) -> None:
    for _ in range(3):
        assert main(["train", "mine.py"]) == 0
    assert names(folder / "runs") == ["mine", "mine-2", "mine-3"]


def test_a_directory_that_was_named_and_is_in_use_is_refused_with_the_next_move(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("here", "here-2"):
        assert main(["train", "mine.py", "--run-dir", name]) == 0
    capsys.readouterr()
    [line] = fails(["train", "mine.py", "--run-dir", "here"], 2, capsys)
    assert line == "penstock: here exists and is not empty; go on with --resume, or name another with --run-dir here-3"
    [line] = fails(["train", "mine.py", "--run-dir", "."], 2, capsys)
    assert line.endswith(f"--run-dir {folder}-2")


def test_an_empty_name_is_no_directory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--run-dir", ""], ["--run-dir=  "], ["--run-dir", "", "--resume"]):
        [line] = fails(["train", "mine.py", *option], 2, capsys)
        assert line == "penstock: --run-dir is empty; name a directory, or leave --run-dir out"
    [line] = fails(["eval", "mine.py", "--model", "tiny", "--out", ""], 2, capsys)
    assert line == "penstock: --out is empty; name a directory, or leave --out out"
    assert names(folder) == ["mine.py"]


def test_an_empty_directory_and_a_missing_one_are_free_and_a_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert next_free(tmp_path / "empty") == tmp_path / "empty"
    assert next_free(tmp_path / "missing") == tmp_path / "missing"
    assert next_free(tmp_path / "file") == tmp_path / "file-2"


def test_the_newest_run_is_the_one_with_the_highest_number(tmp_path: Path) -> None:
    assert newest(tmp_path / "tiny") == tmp_path / "tiny"
    for name in ("tiny", "tiny-2", "tiny-10", "tiny-async", "tiny-async-40", "tiny-007", "other-99"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").touch()
    (tmp_path / "tiny-11").mkdir()  # empty
    (tmp_path / "tiny-12").touch()  # a file
    assert newest(tmp_path / "tiny") == tmp_path / "tiny-10"


def test_a_resume_without_a_directory_goes_on_with_the_newest_run(folder: Path) -> None:
    for _ in range(2):
        assert main(["train", "mine.py"]) == 0
    assert main(["train", "mine.py", "--resume"]) == 0
    assert (folder / "runs" / "mine-2" / "resume").read_text() == "['newest']"
    assert (folder / "runs" / "mine" / "resume").read_text() == "[None]"
    assert names(folder / "runs") == ["mine", "mine-2"]


def test_a_resume_takes_the_settings_of_the_run_and_adds_its_own(folder: Path) -> None:
    lr, there = folder / "there" / "lr", ["train", "mine.py", "--run-dir", "there"]
    assert main([*there, "--set", "part.lr=2e-5", "--set", "part.name=a"]) == 0
    assert remembered_settings(folder / "there") == ["part.lr=2e-5", "part.name=a"]
    assert main([*there, "--resume"]) == 0
    assert lr.read_text() == "2e-05"
    changed = ["--resume", "step-000001", "--set", "part.lr=3e-5", "--allow-change", "part.lr"]
    assert main([*there, *changed]) == 0
    assert lr.read_text() == "3e-05"
    assert (folder / "there" / "resume").read_text() == "['step-000001', 'part.lr']"
    assert json.loads((folder / "there" / "command.json").read_text()) == {
        "config": "mine.py",
        "set": ["part.name=a", "part.lr=3e-5"],
    }
    assert main([*there, "--resume"]) == 0
    assert lr.read_text() == "3e-05"


@pytest.mark.parametrize("content", ["", "[]", '{"set": 3}', '{"set": [3]}', "\xff"])
def test_settings_that_cannot_be_read_are_refused(folder: Path, content: str) -> None:
    (folder / "command.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"command\.json.*give every --set"):
        remembered_settings(folder)


def test_a_run_that_the_command_did_not_begin_has_no_settings(folder: Path) -> None:
    assert remembered_settings(folder) == remembered_settings(folder / "mine.py") == []


def test_a_change_can_only_be_allowed_for_a_run_that_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [line] = fails(["train", "mine.py", "--allow-change", "part.lr"], 2, capsys)
    assert line == "penstock: --allow-change goes with --resume; a new run may have any configuration"


settings = st.lists(st.sampled_from(["a=0", "a=1", "b=0", "b=1", "c=0", "c=1"]), max_size=6)


@given(settings, settings)
def test_joined_settings_set_each_key_once_and_come_to_the_same(before: list[str], now: list[str]) -> None:
    together = joined(before, now)
    assert dict(s.split("=") for s in together) == dict(s.split("=") for s in (*before, *now))
    assert len({s.split("=")[0] for s in together}) == len(together)


def test_a_listing_in_letters_that_the_terminal_does_not_have_ends_well(folder: Path) -> None:
    (folder / "odd.py").write_text("trainer = None\n")
    program = "from penstock.cli import main\nimport sys\nsys.exit(main(['models']) or print('größer ▁█'))"
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PENSTOCK_HOME": str(folder / "größer")}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gr??er ??" in done.stdout
