from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_command import CONFIG, fails

from penstock import __version__
from penstock.cli import main
from penstock.cli.config_file import load_config, parse_value
from penstock.cli.recipes import recipe_names
from penstock.errors import ConfigError


def test_a_file_is_trained_into_a_run_directory_named_after_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "mine.py", "--set", "part.lr=2e-5"]) == 0
    assert (folder / "runs" / "mine" / "lr").read_text() == "2e-05"
    assert "trained tiny" in capsys.readouterr().out


def test_every_problem_of_set_and_of_the_whole_configuration_is_reported_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["part.lr=-1", "part.nme=x", "nonsense", "parts.1.name=bad", "ending=impossible", "part.params.top_p=7"]
    settings += ["model=smollm2-135b"]
    lines = fails(["train", "mine.py", *(word for setting in settings for word in ("--set", setting))], 2, capsys)
    assert lines == [
        "penstock: --set part.lr=-1: PartConfig.lr is -1; input should be greater than 0.",
        "penstock: --set part.nme: PartConfig has no 'nme'. Did you mean 'name'?",
        "penstock: --set nonsense: it must be KEY=VALUE, like --set train.lr=2e-5",
        "penstock: --set part.params.top_p=7: SampleParams: top_p is 7.0; it must be above 0 and at most 1",
        "penstock: ending is 'impossible'; it must be possible",
        "penstock: parts.1: name is 'bad'; it must be good",
        "penstock: there is no model 'smollm2-135b'. Did you mean 'smollm2-135m'? "
        "A directory or a hub id (owner/name) works too.",
    ]
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


def test_a_refused_dataset_shows_every_row_and_leaves_nothing_on_disk(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = fails(["train", "mine.py", "--set", "ending=dataset"], 2, capsys)
    assert lines == ["penstock: rows.jsonl:3: no prompt", "penstock: rows.jsonl:9: not JSON"]
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


def test_a_run_that_cannot_go_on_exits_1_and_one_that_is_stopped_at_once_130(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails(["train", "mine.py", "--set", "ending=run error"], 1, capsys) == ["penstock: no engine is left"]
    assert fails(["train", "mine.py", "--set", "ending=second interrupt"], 130, capsys) == []
    [line] = fails(["train", "mine.py", "--set", "ending=interrupt"], 130, capsys)
    assert line == "penstock: interrupted before the run began or after it ended; what there is of it is in runs/mine"


def test_a_run_that_ended_in_order_after_a_signal_exits_0_and_prints_how_to_resume(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "mine.py", "--set", "ending=cut short", "--run-dir", "here"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "Resume with: penstock train mine.py --run-dir here --resume"


def test_a_run_that_lost_its_weights_goes_on_by_itself_from_its_newest_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "mine.py", "--set", "ending=lost", "--run-dir", "here"]) == 0
    assert "StateLost: the weights are lost\nThe run goes on by itself" in capsys.readouterr().out
    assert (folder / "here" / "resume").read_text() == "['newest']"


def test_a_run_that_was_told_to_end_before_it_lost_its_weights_ends_and_prints_how_to_resume(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "mine.py", "--set", "ending=lost after a signal", "--run-dir", "here"]) == 1
    said = capsys.readouterr()
    assert said.err == "penstock: the weights are lost\n"
    assert said.out.splitlines()[-1] == "Resume with: penstock train mine.py --run-dir here --resume"
    assert not (folder / "here" / "resume").exists()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\ny = = 2\n", "broken.py:2: invalid syntax"),
        ("import os\nimport no_such_module\n", "broken.py:2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f():\n    return 1 / 0\n\n\nf()\n", "broken.py:2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('stop')\n", "broken.py:2: SystemExit: stop"),
        ("x = 1\n", "broken.py: it must set `trainer` to a trainer's configuration."),
        ("from penstock.config import Config\ntrainer = Config()\n", "broken.py: it must set `trainer`"),
        ("trainer = 3\n", "broken.py: it must set `trainer` to a trainer's configuration."),
        (CONFIG + "trainer = TrainerConfig(modle='x')\n", "Did you mean 'model'? broken.py:"),
        ("from penstock.config import import_name\nimport_name('os.nothing')\n", "'os.nothing' cannot be imported"),
        (
            "from penstock.rollout import SampleParams\nSampleParams(top_p=2)\n",
            "broken.py:2: ValueError: SampleParams:",
        ),
        ("x = '\\ud800'.encode()\n", "broken.py:1: UnicodeEncodeError"),
        ("\0", "broken.py"),
    ],
)
def test_a_configuration_file_that_fails_is_refused_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str], source: str, said: str
) -> None:
    (folder / "broken.py").write_text(source)
    [line] = fails(["train", "broken.py"], 2, capsys)
    assert said in line


def test_a_misspelt_trainer_variable_is_recognised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken.py").write_text(CONFIG.replace("\ntrainer =", "\ntrainr ="))
    [line] = fails(["train", "broken.py"], 2, capsys)
    assert line.endswith("Did you mean 'trainr'?")


def test_an_unknown_recipe_is_refused_with_the_nearest_and_the_list(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [line] = fails(["train", "quikstart"], 2, capsys)
    assert "there is no recipe 'quikstart'. Did you mean 'quickstart'?" in line
    assert ", ".join(recipe_names()) in line
    [line] = fails(["train", "missing.py"], 2, capsys)
    assert "missing.py does not exist" in line


def test_a_file_can_import_its_neighbours_and_its_functions_have_a_name_to_import(folder: Path) -> None:
    (folder / "rewards_of_mine.py").write_text("def reward():\n    return 1\n")
    (folder / "with_neighbour.py").write_text(CONFIG + "from rewards_of_mine import reward\ndef own(): ...\n")
    load_config("with_neighbour.py")
    assert sys.modules["with_neighbour"].own.__module__ == "with_neighbour"


def test_a_file_named_like_an_imported_module_does_not_replace_it(folder: Path) -> None:
    (folder / "json.py").write_text(CONFIG)
    before = sys.modules["json"]
    load_config("json.py")
    assert sys.modules["json"] is before


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-5", 1e-5),
        ("true", True),
        ("True", True),
        ("null", None),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ("(0.9, 0.95)", (0.9, 0.95)),
        ('"3"', "3"),
        ("runs/x", "runs/x"),
        ("", ""),
        ("a=b", "a=b"),
    ],
)
def test_a_value_is_json_or_a_python_literal_or_text(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_a_value_may_contain_an_equals_sign(folder: Path) -> None:
    assert load_config("mine.py", ["part.name=a=b"]).describe()["part"]["name"] == "a=b"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_the_model_is_loaded_is_said_and_exits_130(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    [line] = fails(["train", "mine.py", "--set", f"ending={name}"], 130, capsys)
    assert line == f"penstock: {name} while loading; nothing was trained"
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_between_loading_and_training_is_said_and_exits_130(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = signal.getsignal(getattr(signal, name))
    [line] = fails(["train", "mine.py", "--set", f"ending=early {name}"], 130, capsys)
    assert line == f"penstock: {name} before the run began or after it ended; what there is of it is in runs/mine"
    assert signal.getsignal(getattr(signal, name)) is before


def test_eval_uses_the_model_given_and_prints_what_it_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "mine.py", "--model", "smollm2-135m"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["accuracy 50.0 %", "answers and figures are in evals/mine"]
    assert (folder / "evals" / "mine" / "result.json").exists()
    assert main(["eval", "mine.py", "--model", "smollm2-135m", "--out", "there"]) == 0
    assert (folder / "there" / "result.json").exists()
    capsys.readouterr()
    [line] = fails(["eval", "mine.py", "--model", "smollm2-135m", "--out", "there"], 2, capsys)
    assert "there exists and is not empty" in line
    [line] = fails(["eval", "mine.py", "--model", "smollm2-135m", "--set", "evaluator=null"], 2, capsys)
    assert "there is nothing to evaluate" in line


def test_recipes_are_listed_with_their_first_line_shown_and_copied_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == recipe_names()
    assert {"gsm8k", "gym", "quickstart", "quickstart-async", "tiny", "tiny-async"} <= set(recipe_names())
    assert all(line.endswith(".") for line in listed)
    assert main(["recipes", "copy", "tiny"]) == 0
    capsys.readouterr()
    assert main(["recipes", "show", "tiny"]) == 0
    assert capsys.readouterr().out == (folder / "tiny.py").read_text()
    [line] = fails(["recipes", "copy", "tiny"], 2, capsys)
    assert line == "penstock: tiny.py exists; name another file: penstock recipes copy tiny FILE"
    [line] = fails(["recipes", "show", "tinny"], 2, capsys)
    assert "Did you mean 'tiny'?" in line


def test_models_are_listed_with_where_they_are(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.models import set_cache_directory

    monkeypatch.setenv("PENSTOCK_HOME", str(folder))
    (folder / "models" / "tiny-1").mkdir(parents=True)
    (folder / "models" / "tiny-1" / "config.json").write_text("{}")
    try:
        assert main(["models"]) == 0
        listed = capsys.readouterr().out
        assert str(folder / "models" / "tiny-1") in listed
        assert "not made yet" in listed
        assert main(["models", "tiny"]) == 0
        assert capsys.readouterr().out == f"{folder / 'models' / 'tiny-1'}\n"
        [line] = fails(["models", "tinny"], 2, capsys)
        assert "Did you mean 'tiny'?" in line
    finally:
        set_cache_directory(None)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"penstock {__version__}\n"


def test_a_bad_configuration_is_refused_before_torch_is_imported(folder: Path) -> None:
    program = (
        "import sys\nfrom penstock.cli import main\n"
        "code = main(sys.argv[1:])\nprint(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", program, "train", "mine.py", "--set", "part.lr=-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)
    assert done.stdout == "2 False False\n"


def test_a_command_that_is_started_without_input_and_output_ends_well(folder: Path) -> None:
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom penstock.cli import main\n"
        "code = main(['train', 'mine.py'])\n"
        "Path('kept').write_text(repr([code, *(os.readlink(f'/proc/self/fd/{n}') for n in range(3))]))\n"
    )
    started = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", program]
    assert subprocess.run(started, timeout=120, check=False).returncode == 0
    assert (folder / "kept").read_text() == repr([0, *["/dev/null"] * 3])
    assert (folder / "runs" / "mine" / "lr").exists()


def test_a_listing_whose_reader_left_ends_quietly(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "penstock.cli", "recipes", "show", "quickstart"]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_configuration_without_a_trainer_raises_config_error_for_callers(folder: Path) -> None:
    with pytest.raises(ConfigError):
        load_config("no_such_recipe")
