"""Which functions can be found again in another process, and why the others cannot."""

import asyncio
import functools
import json
import sys
import types

import pytest

from penstock.errors import ConfigError
from penstock.judger import exact_match, math_equal, trl_reward, verl_reward
from penstock.judger.handler import locate_handler
from penstock.rollout import Verdict


def problems(config):
    return list(config.problems())


def test_a_lambda_is_refused_with_the_reason(make_config):
    (problem,) = problems(make_config(lambda response, label, extra_info: 1.0))
    assert "it is a lambda" in problem
    assert "top level" in problem


def test_a_closure_is_refused_with_the_reason(rewards, make_config):
    (problem,) = problems(make_config(rewards.make_closure()))
    assert "defined inside another function" in problem


def test_a_partial_and_a_bound_method_are_refused(rewards, make_config):
    (problem,) = problems(make_config(functools.partial(rewards.length)))
    assert "an object of class partial" in problem
    (problem,) = problems(make_config(rewards.Grader().method))
    assert "a method of an object" in problem


@pytest.mark.parametrize("make", [lambda config: config, verl_reward, trl_reward])
def test_a_class_is_refused_because_it_gives_an_object_and_no_score(rewards, make_config, make):
    """Also one that could be called with what a function is called with."""
    for handler in (rewards.Grader, rewards.Graded, "fractions.Fraction"):
        config = make_config(handler) if make.__name__ == "<lambda>" else make(handler)
        (problem,) = problems(config)
        assert "is a class, and calling it makes an object and no score" in problem
    assert problems(make_config(rewards.Grader.grade)) == []


def test_a_function_whose_name_now_means_another_is_refused(make_config):
    module = types.ModuleType("a_module_that_changed")
    exec("def reward(response, label, extra_info): return 1.0", module.__dict__)
    old = module.reward
    exec("def reward(response, label, extra_info): return 2.0", module.__dict__)
    sys.modules["a_module_that_changed"] = module
    try:
        (problem,) = problems(make_config(old))
    finally:
        del sys.modules["a_module_that_changed"]
    assert "is something else" in problem


def test_a_function_without_module_and_file_is_refused(make_config):
    module = types.ModuleType("a_module_of_nowhere")
    exec("def reward(response, label, extra_info): return 1.0", module.__dict__)
    (problem,) = problems(make_config(module.reward))
    assert "cannot be imported and it has no file" in problem


def test_an_async_function_may_be_a_closure(make_config):
    async def reward(response, label, extra_info):
        return 1.0

    assert problems(make_config(reward)) == []


def test_building_a_refused_function_raises_the_same_reason(make_config):
    with pytest.raises(ConfigError, match="it is a lambda"):
        make_config(lambda response, label, extra_info: 1.0).build()


def test_a_function_of_a_file_is_found_by_file(rewards):
    setup = locate_handler(rewards.length)
    assert (setup.module, setup.file, setup.name) == ("", rewards.__file__, "length")
    assert locate_handler(rewards.Grader.grade).name == "Grader.grade"


def test_a_function_of_a_package_is_found_by_module():
    assert locate_handler(exact_match).module == "penstock.judger.rewards"
    assert locate_handler(json.dumps).module == "json"
    assert locate_handler("json.dumps").name == "dumps"
    assert locate_handler("json:dumps").module == "json"


def test_names_that_lead_nowhere_are_problems(rewards, make_config):
    for handler, reason in [
        ("json.dumbs", "AttributeError"),
        ("no_such_package.reward", "ModuleNotFoundError"),
        ("/no/such/file.py:reward", "FileNotFoundError"),
        (f"{rewards.__file__}:missing", "AttributeError"),
        (f"{rewards.__file__}:not_a_function", "not a function"),
        ("reward", "names no module"),
        ("exact_match", "Penstock's own is 'penstock.judger.rewards.exact_match'"),
    ]:
        (problem,) = problems(make_config(handler))
        assert reason in problem, handler


def test_a_file_that_ends_its_process_when_it_is_imported_is_a_problem_and_nothing_ends(make_config, tmp_path):
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage: script.py')\n")
    with pytest.raises(ConfigError, match=r"script.py:judge' cannot be loaded: raised SystemExit: usage"):
        make_config(f"{tmp_path}/script.py:judge").check()


def test_a_generator_is_refused(make_config, tmp_path):
    (tmp_path / "rewards.py").write_text("def judge(response, label, extra_info):\n    yield 1.0\n")
    with pytest.raises(ConfigError, match="judge is a generator; it must return"):
        make_config(f"{tmp_path}/rewards.py:judge").check()


def test_a_missing_extra_is_a_problem_that_says_what_to_install(rewards, make_config):
    assert problems(make_config(math_equal)) == []
    rewards.length.penstock_needs = (("no_such_package", "math"),)
    try:
        (problem,) = problems(make_config(rewards.length))
    finally:
        del rewards.length.penstock_needs
    assert "pip install 'penstock[math]'" in problem


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("verl_compute_score", Verdict(1.0, {"source_is": 1.0, "level": 3.0})),
        ("verl_gsm8k", Verdict(1.0)),
        ("verl_open", Verdict(1.0)),
        ("verl_async", Verdict(1.0)),
    ],
)
def test_a_reward_function_of_verl_is_called_by_its_names(rewards, make_config, answered, caplog, name, verdict):
    config = make_config(getattr(rewards, name))
    assert problems(config) == []
    judger = config.build()
    answer = asyncio.run(judger.judge(answered("42", "42", data_source="gsm8k", extra_info={"level": 3})))
    asyncio.run(judger.close())
    assert answer == verdict
    assert f"{name} has the signature of verl's reward functions" in caplog.text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("trl_reward", "has the parameter 'completions', so its signature is TRL's"),
        ("trl_with_prompts", "judger_config=trl_reward(f)"),
        ("verl_batch", "verl's batch manager"),
        ("openrlhf", "OpenRLHF's"),
        ("other_order", "has the first parameter 'data_source', but it is called as (response, label, extra_info)"),
        ("verl_with_more", "as verl does: missing a required argument: 'tokenizer'"),
    ],
)
def test_a_signature_of_another_framework_that_cannot_be_called_is_refused(rewards, make_config, name, reason):
    (problem,) = problems(make_config(getattr(rewards, name)))
    assert reason in problem


def test_other_names_are_called_in_order(rewards, make_config, caplog):
    make_config(rewards.length).build()
    assert caplog.text == ""
