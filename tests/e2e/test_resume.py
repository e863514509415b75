"""A run that goes on, as a user makes it go on: the command, in this process."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.models import resolve_model
from penstock.replay.lock import LOCK_FILE, RunLock

pytestmark = pytest.mark.long_tier

SMALL = ["--set", "evaluator=null", "--set", "train_batch_size=2", "--set", "total_steps=2"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def learning_rates(run: str) -> list[float]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [line["train/lr"] for line in lines]


def test_a_run_is_trained_resumed_with_its_settings_and_changed_where_that_is_allowed(capsys):
    assert main(["train", "tiny", *SMALL, "--set", "train.lr=5e-4"]) == 0
    assert main(["train", "tiny", *SMALL]) == 0  # the same line again: a run of its own
    assert sorted(path.name for path in Path("runs").iterdir()) == ["tiny", "tiny-2"]
    capsys.readouterr()

    mine = ["train", "tiny", "--run-dir", "runs/tiny", "--resume"]
    assert main([*mine, "--set", "total_steps=3"]) == 0
    assert learning_rates("runs/tiny") == [5e-4] * 3
    capsys.readouterr()

    longer = [*mine, "--set", "total_steps=4", "--set", "train.lr=1e-4"]
    assert main(longer) == 2
    said = capsys.readouterr().err
    assert "train.lr: 0.0005 -> 0.0001" in said and "--allow-change train.lr" in said and "eval_interval" in said
    assert learning_rates("runs/tiny") == [5e-4] * 3
    assert main([*longer, "--allow-change", "train.lr"]) == 0
    assert learning_rates("runs/tiny") == [5e-4] * 3 + [1e-4]

    assert main(["train", "tiny", "--run-dir", "runs/tiny", "--resume", "step-000001"]) == 2
    assert "there are step-000004, step-000003, in runs/tiny/checkpoints" in capsys.readouterr().err


def test_what_auto_stands_for_is_said_once_found_and_kept_when_the_run_goes_on(capsys):
    auto = ["deterministic=false", "train.dtype=auto", "engines.engine.dtype=auto"]
    assert main(["train", "tiny", *SMALL, *(word for each in auto for word in ("--set", each))]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("arithmetic: training")]
    assert "as the run began" not in line
    assert main(["train", "tiny", "--run-dir", "runs/tiny", "--resume", "--set", "total_steps=3"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("arithmetic: training")]
    assert line.endswith("as the run began")
    told = [json.loads(line) for line in Path("runs/tiny/events.jsonl").read_text().splitlines()]
    first, second = [event for event in told if event["kind"] == "arithmetic_chosen"]
    assert (first["train"], first["engine"]) == (second["train"], second["engine"])
    assert second["began_on"] == first["cpu"]


def test_a_run_does_not_go_on_with_another_model_in_the_same_directory(tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    assert main(["train", "tiny", *SMALL, "--set", "model=./model", "--run-dir", "run"]) == 0
    kept = {name: Path("run", name).read_bytes() for name in ("summary.json", "metrics.jsonl", "config.json")}
    resume = ["train", "tiny", "--run-dir", "run", "--resume", "--set", "total_steps=3"]
    files = {"model.safetensors": "weights", "tokenizer_config.json": "tokenizer", "config.json": "config"}
    for file, kind in files.items():
        before = (model / file).read_bytes()
        (model / file).write_bytes(before[:-3] + b" " + before[-2:])
        capsys.readouterr()
        assert main(resume) == 2
        said = capsys.readouterr().err
        assert "checkpoint 2 was made from another model" in said and f"its {kind}: {file}" in said
        (model / file).write_bytes(before)
    assert {name: Path("run", name).read_bytes() for name in kept} == kept
    assert main(resume) == 0


def test_a_finished_run_that_is_extended_keeps_the_evaluation_of_its_end(read_lines):
    command = ["--set", "train_batch_size=2", "--set", "evaluator.eval_sample_num=4", "--run-dir", "run"]
    assert main(["train", "tiny", *command, "--set", "total_steps=2"]) == 0

    def evaluated():
        return [line["step"] for line in read_lines(Path("run/metrics.jsonl")) if line["kind"] == "eval"]

    assert evaluated() == [0, 2]
    assert main(["train", "tiny", *command, "--resume", "--set", "total_steps=3"]) == 0
    assert evaluated() == [0, 2, 3]
    assert json.loads(Path("run/summary.json").read_text())["eval_after_step"] == 3


def test_a_run_in_memory_holds_its_directory_and_cannot_be_resumed(capsys):
    memory = ["--set", "replay_buffer.storage=memory", "--run-dir", "run"]
    Path("run").mkdir()
    lock = RunLock(Path("run", LOCK_FILE))
    assert main(["train", "tiny", *SMALL, *memory]) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert [path.name for path in Path("run").iterdir()] == [LOCK_FILE]
    lock.release()
    Path("run", LOCK_FILE).unlink()
    assert main(["train", "tiny", *SMALL, *memory]) == 0
    capsys.readouterr()
    assert main(["train", "tiny", "--run-dir", "run", "--resume"]) == 2
    assert "its ledger is gone" in capsys.readouterr().err


def test_what_a_judge_prints_is_in_a_file_of_the_run_and_said_once(tmp_path, capfd):
    (tmp_path / "loud_run.py").write_text(
        "import sys\n"
        "from penstock.recipes.tiny import trainer as tiny\n"
        "def loud(response, label, extra_info):\n"
        "    print('judging', label)\n"
        "    print('aloud', file=sys.stderr)\n"
        "    return float(response == label)\n"
        "trainer = tiny.replace('manager.tasks.0.judger_config', loud)\n"
        "trainer = trainer.replace('evaluator.tasks.0.judger_config', loud)\n"
    )
    small = ["--set", "train_batch_size=2", "--set", "total_steps=2", "--set", "evaluator.eval_sample_num=4"]
    assert main(["train", "loud_run.py", *small]) == 0
    shown = capfd.readouterr()
    assert "judging" not in shown.out + shown.err and "aloud" not in shown.err
    assert shown.out.count("the judges print; what they print is in runs/loud_run/judges.log") == 1
    printed = Path("runs/loud_run/judges.log").read_text().splitlines()
    assert len([line for line in printed if line.startswith("judging ")]) >= 2 * 2 * 8 and "aloud" in printed
    assert main(["eval", "loud_run.py", "--model", "tiny", *small[4:]]) == 0
    assert "evals/loud_run/judges.log" in capfd.readouterr().out
    assert Path("evals/loud_run/judges.log").read_text().count("judging ") == 8


def test_what_a_judge_printed_before_it_was_refused_is_shown(tmp_path, capfd):
    (tmp_path / "broken_run.py").write_text(
        "from penstock.recipes.tiny import trainer as tiny\n"
        "def broken(response, label, extra_info):\n"
        "    print('so far, so good')\n"
        "    return lable\n"
        "trainer = tiny.replace('manager.tasks.0.judger_config', broken)\n"
    )
    assert main(["train", "broken_run.py"]) == 2
    said = capfd.readouterr().err
    assert "NameError" in said and "it printed: so far, so good" in said
    assert not Path("runs").exists()
