"""Custom losses and advantages are tried when the configuration is checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.errors import ConfigError
from penstock.recipes import tiny

FUNCTIONS = """\
import torch

from penstock.learn.losses import LossTerms


def good(tokens, config):
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    return LossTerms(-ratio * tokens.advantages, {"ratio": ratio.detach()})


def one_argument(tokens):
    return LossTerms(tokens.logprobs)


def plain_number(tokens, config):
    return 1.0


def mean(tokens, config):
    return LossTerms(tokens.logprobs.mean())


def not_a_number(tokens, config):
    return LossTerms(tokens.logprobs * float("nan"))


def raises_off_policy(tokens, config):
    if not tokens.on_policy:
        raise RuntimeError("only on policy")
    return good(tokens, config)


def no_gradient(tokens, config):
    return LossTerms(tokens.logprobs.detach())


def infinite_gradient(tokens, config):
    return LossTerms((tokens.logprobs - tokens.logprobs.detach()).abs().sqrt())


def good_advantage(scores):
    return [[score - 0.5 for score in group] for group in scores]


def half(scores):
    return scores[1:]


def no_scores(batch, config):
    return batch


def needs_two(scores):
    return [[score - group[1] for score in group] for group in scores]


def nan(scores):
    return [[float("nan") for _ in group] for group in scores]
"""


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The dotted path of a function of a user's file."""
    (tmp_path / "own_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "own_functions", raising=False)
    return lambda function: f"own_functions.{function}"


def line_of(text: str) -> str:
    return f"own_functions.py:{1 + next(i for i, line in enumerate(FUNCTIONS.splitlines()) if text in line)}"


@pytest.mark.parametrize(
    ("function", "said", "line"),
    [
        ("one_argument", "TypeError: one_argument() takes 1 positional argument but 2 were given", "def one_argument"),
        ("plain_number", "it returned a float; it must return LossTerms", "def plain_number"),
        ("mean", "loss must be a tensor of one number per token, of shape (6,); it has shape ()", "def mean"),
        ("not_a_number", "loss is not finite", "def not_a_number"),
        ("raises_off_policy", "it raised RuntimeError: only on policy", "raise RuntimeError"),
        ("no_gradient", "its loss does not depend on tokens.logprobs", "def no_gradient"),
        ("infinite_gradient", "the gradient of tokens.logprobs is not finite", "def infinite_gradient"),
    ],
)
def test_a_loss_that_cannot_work_is_refused_with_its_name_and_line(
    name: Callable[[str], str], function: str, said: str, line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny.trainer.replace("train.loss", name(function)).check()
    [problem] = refused.value.problems
    assert problem.startswith(f"train.loss: own_functions.{function} ")
    assert said in problem and line_of(line) in problem


@pytest.mark.parametrize(
    ("function", "said", "line"),
    [
        ("half", "the estimator did not answer with one number per score", "def half"),
        ("no_scores", "missing 1 required positional argument: 'config'", "def no_scores"),
        ("nan", "16 advantages are not finite, the first is nan", "def nan"),
    ],
)
def test_an_advantage_that_cannot_work_is_refused_with_its_name_and_line(
    name: Callable[[str], str], function: str, said: str, line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny.trainer.replace("train.advantage", name(function)).check()
    [problem] = refused.value.problems
    assert problem.startswith(f"train.advantage: own_functions.{function} ")
    assert said in problem and line_of(line) in problem


def test_functions_that_work_pass(name: Callable[[str], str]) -> None:
    tiny.trainer.replace("train.loss", name("good")).replace("train.advantage", name("good_advantage")).check()


def test_an_advantage_is_tried_with_the_smallest_group_it_will_meet(name: Callable[[str], str]) -> None:
    config = tiny.trainer.replace("train.advantage", name("needs_two"))
    config.check()
    with pytest.raises(ConfigError, match=r"groups of \[1, 8\]: IndexError"):
        config.replace("manager.failures.min_group_size", 1).check()


def test_the_command_refuses_a_broken_loss_and_leaves_nothing_on_disk(
    name: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "tiny", "--set", f"train.loss={name('plain_number')}"]) == 2
    assert "it must return LossTerms" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["own_functions.py"]
