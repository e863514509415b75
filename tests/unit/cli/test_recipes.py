"""Every recipe loads, passes its check, and asks what its docstring says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.config_file import load_config
from penstock.errors import ConfigError


@pytest.mark.parametrize("name", ["quickstart", "tiny", "gym", "code-tiny"])
def test_a_recipe_that_needs_no_files_passes_its_check(name: str) -> None:
    load_config(name)


def test_gsm8k_without_its_files_is_refused_naming_both() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("gsm8k")
    assert len(refused.value.problems) == 2
    assert "manager.tasks.0.sampler_config.dataset: path is 'gsm8k/train.jsonl'" in refused.value.problems[0]
    assert "evaluator.tasks.0.sampler_config.dataset: path is 'gsm8k/test.jsonl'" in refused.value.problems[1]


def test_gsm8k_takes_the_users_files_and_reads_rows_as_they_are_published(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"}) + "\n")
    paths = [f"{part}.tasks.0.sampler_config.dataset.path={file}" for part in ("manager", "evaluator")]
    config = load_config("gsm8k", paths).describe()
    [task] = config["manager"]["tasks"]
    assert task["sampler_config"]["dataset"]["path"] == str(file)

    from penstock.judger import final_number
    from penstock.recipes.gsm8k import to_rollout

    rollout = to_rollout(json.loads(file.read_text()))
    assert final_number("It is 4.", rollout.ground_truth, {}) == 1.0
    assert final_number("It is 5.", rollout.ground_truth, {}) == 0.0


def test_the_tiny_recipe_asks_what_the_tiny_model_was_taught() -> None:
    from penstock.models.tiny import LETTERS, MAX_LENGTH, MIN_LENGTH
    from penstock.recipes.tiny import answer, words

    assert (words.alphabet, words.min_length, words.max_length) == (LETTERS, MIN_LENGTH, MAX_LENGTH)
    assert answer.sample_params.max_tokens > MAX_LENGTH
    assert words.template == "{word}>"


def test_the_code_recipe_asks_what_its_model_was_taught() -> None:
    from penstock.models.tiny_code import OPERATIONS
    from penstock.recipes.code_tiny import answer, functions

    asked = [prompt.messages[0]["content"] for prompt in functions.prompts()]
    assert {text[:3] for text in asked} == set(OPERATIONS)
    assert all(len(text) == len("add 10>") and text.endswith(">") for text in asked)
    assert answer.sample_params.max_tokens > len("def f(x): return x+10")


def test_the_judge_of_gsm8k_is_any_endpoint_and_can_be_set(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"}) + "\n")
    paths = [f"{part}.tasks.0.sampler_config.dataset.path={file}" for part in ("manager", "evaluator")]
    judge = "manager.tasks.0.judger_config.all_of.reasoning"
    config = load_config("gsm8k-llm-judge", [*paths, f"{judge}.base_url=http://judge:1/v1", f"{judge}.model=m"])
    [task] = config.describe()["manager"]["tasks"]
    assert task["judger_config"]["all_of"]["reasoning"]["base_url"] == "http://judge:1/v1"
    with pytest.raises(ConfigError, match="base_url is 'nowhere'"):
        load_config("gsm8k-llm-judge", [*paths, f"{judge}.base_url=nowhere"])
