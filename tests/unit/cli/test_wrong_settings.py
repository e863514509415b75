"""What a user may get wrong on the command line: refused in a second, with what is wrong, and nothing on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_command import fails

from penstock.cli.config_file import load_config

TASK = "manager.tasks.0"
LOOP = f"{TASK}.agent_loop_config"

WRONG = [
    # Numbers without an end.
    ("train.lr=inf", "lr is 'inf'; input should be less than or equal to 10"),
    ("train.lr=1e400", "lr is inf; input should be less than or equal to 10"),
    ("train.lr=nan", "lr is 'nan'"),
    ("train.eps=inf", "eps is 'inf'"),
    ("train.max_grad_norm=inf", "max_grad_norm is 'inf'"),
    (f"total_steps={10**25}", "total_steps is 1"),
    (f"train_batch_size={10**25}", "train_batch_size is 1"),
    ("total_steps=true", "total_steps is True; it must be a number"),
    (f"seed={10**25}", "it must be at most 9,223,372,036,854,775,807"),
    ("cpu_threads=100000", "threads only stand in each other's way"),
    # What cannot work together.
    ("manager.failures.min_group_size=1", "min_group_size is 1; train.advantage is 'grpo', which compares siblings"),
    (f"{TASK}.sampler_config.prompt_repeat_k=1", "grpo compares siblings and needs at least 2"),
    (f"{LOOP}.sample_params.min_tokens=2", "min_tokens is 2; it forbids to end an answer"),
    (f"{LOOP}.sample_params.top_p=0.9", "sample_params cut the distribution"),
    # Words.
    (f"{LOOP}.sample_params.max_token=8", "SampleParams has no 'max_token'. Did you mean 'max_tokens'?"),
    (f"{LOOP}.sample_params.stop=3", "Expected `array`, got `int`"),
    ("train.schedule=cosinus", "input should be 'constant', 'linear' or 'cosine'"),
    ("replay_buffer.storage=redis", "input should be 'memory' or 'sqlite'"),
    ("model=", "model is empty; give a known name"),
    ("model=/nowhere/at/all", "model directory /nowhere/at/all does not exist"),
    ("tasks.0.wieght=2", "TaskSpecConfig has no 'wieght'. Did you mean 'weight'?"),
    (f"{TASK}.nothing", "it must be KEY=VALUE"),
    # Functions.
    (f"{LOOP}.loop=no.such.loop", "loop: 'no.such.loop' cannot be imported"),
    (f"{LOOP}.loop=json.dumps", "loop is json.dumps; it must be a subclass of penstock.agent_loop.AgentLoop"),
    (f"{LOOP}.loop=penstock.agent_loop.AgentLoop", "AgentLoop does not define generate_sample"),
    (f'{LOOP}.arguments={{"x": 1}}', "SingleTurnAgentLoop takes no 'x'."),
    (f"{TASK}.judger_config=no.such.judge", "'no.such.judge' cannot be loaded"),
    (f"{TASK}.judger_config=3", "it must be a JudgerConfig, a function or its name"),
    ("train.advantage=gprow", "advantage is 'gprow', which is not known. Did you mean 'grpo'?"),
    ("train.advantage=os.getcwd", "getcwd fails on a made-up batch"),
    ("train.loss=os.getcwd", "getcwd fails on a made-up batch"),
    ("train.loss=nope", "it is not a loss"),
]


@pytest.mark.parametrize(("setting", "said"), WRONG, ids=[setting for setting, _ in WRONG])
def test_a_wrong_setting_is_refused_and_leaves_nothing_behind(
    folder: Path, capsys: pytest.CaptureFixture[str], setting: str, said: str
) -> None:
    lines = fails(["train", "tiny", "--set", setting], 2, capsys)
    assert any(said in line for line in lines), lines
    # Where it is wrong is on the command line, and in no file of Penstock's.
    assert not [line for line in lines if "config.py:" in line or "config_file.py:" in line]
    assert "Known: ." not in "".join(lines)
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


@pytest.mark.parametrize("field", ["train.loss", "train.advantage", f"{LOOP}.loop", f"{TASK}.judger_config"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x = undefined\n", "NameError: name 'undefined' is not defined"),
        ("def broken(:\n", "SyntaxError: "),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_a_function_whose_module_cannot_be_imported_is_refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    field: str,
    content: str,
    said: str,
) -> None:
    (folder / "broken_module.py").write_text(content)
    monkeypatch.syspath_prepend(folder)
    lines = fails(["train", "tiny", "--set", f"{field}=broken_module.broken"], 2, capsys)
    assert any(said in line and "broken_module" in line for line in lines), lines
    assert sorted(path.name for path in folder.iterdir()) == ["broken_module.py", "mine.py"]


@pytest.mark.parametrize("share", ["inf", "1e6"])
def test_over_sampling_without_an_end_is_refused(capsys: pytest.CaptureFixture[str], folder: Path, share: str) -> None:
    setting = f"{TASK}.produce_strategy_config.over_sample_threshold={share}"
    [line] = fails(["train", "tiny-async", "--set", setting], 2, capsys)
    assert "over_sample_threshold is " in line


@pytest.mark.parametrize("path", ["manager.tasks.0.weight", "tasks.0.weight"])
def test_a_task_is_found_however_it_was_given(folder: Path, path: str) -> None:
    recipe = "from penstock.recipes.tiny import trainer as tiny\nfrom penstock import RLColocateTrainerConfig\n"
    fields = 'model="tiny", total_steps=1, train_batch_size=2'
    for name, given in {"one": "tiny.manager.tasks[0]", "many": "tiny.manager.tasks"}.items():
        (folder / f"{name}.py").write_text(f"{recipe}trainer = RLColocateTrainerConfig({fields}, tasks={given})\n")
        described = load_config(f"{name}.py", [f"{path}=2"]).describe()
        [task] = described["manager"]["tasks"]
        assert task["weight"] == 2.0 and "tasks" not in described


def test_a_text_is_one_stop_and_a_function_is_named_by_its_path(folder: Path) -> None:
    settings = [f"{LOOP}.sample_params.stop=</answer>", f"{TASK}.judger_config=penstock.judger.exact_match"]
    [task] = load_config("tiny", settings).describe()["manager"]["tasks"]
    assert list(task["agent_loop_config"]["sample_params"]["stop"]) == ["</answer>"]
    assert task["judger_config"] == "penstock.judger.exact_match"
