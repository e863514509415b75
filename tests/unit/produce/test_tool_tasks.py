"""What a task with tools asks of its prompts and of the model's chat template, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_families import tokenizer_of

from penstock.agent_loop import EnvAgentLoopConfig, SingleTurnAgentLoopConfig, ToolAgentLoopConfig, calculator
from penstock.data import AdditionConfig, DatasetConfig, SamplerConfig
from penstock.errors import ConfigError
from penstock.judger import final_number
from penstock.produce import TaskSpecConfig, check_templates, load_prompts
from penstock.rollout import SampleParams


def task(loop: Any, dataset: Any = None) -> TaskSpecConfig:
    return TaskSpecConfig(
        task_name="t",
        sampler_config=SamplerConfig(dataset=dataset or AdditionConfig(max_number=1, held_out=0), prompt_repeat_k=2),
        agent_loop_config=loop,
        judger_config=final_number,
    )


def tools(**fields: Any) -> ToolAgentLoopConfig:
    return ToolAgentLoopConfig(tools=[calculator], sample_params=SampleParams(max_tokens=8), **fields)


def test_the_loops_tools_are_rendered_into_the_prompts() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    prompts = load_prompts([task(tools())], tokenizer, context=10_000)["t"].prompts
    assert all(prompt.tools[0]["function"]["name"] == "calculator" for prompt in prompts)
    assert '"name": "calculator"' in tokenizer.decode(list(memoryview(prompts[0].ids).cast("i")))


def test_a_row_that_names_tools_keeps_its_own(tmp_path: Path) -> None:
    own = [{"type": "function", "function": {"name": "mine", "parameters": {}}}]
    row = {"prompt": "?", "reward_model": {"ground_truth": "1"}, "data_source": "d"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"tools": own}) + "\n")
    loaded = load_prompts(
        [task(tools(), DatasetConfig(path=str(tmp_path / "rows.jsonl")))], tokenizer_of("qwen2.5"), context=10_000
    )
    names = [prompt.tools[0]["function"]["name"] for prompt in loaded["t"].prompts]
    assert names == ["calculator", "mine"]


def test_a_template_under_which_results_cannot_follow_is_refused() -> None:
    with pytest.raises(ConfigError, match="task 't': a tool message cannot follow an answer"):
        check_templates([task(tools())], tokenizer_of("gemma"))


def test_a_template_that_rewrites_answers_is_named_once() -> None:
    loop = EnvAgentLoopConfig(env="env_classes.Counts")
    [told] = check_templates([task(loop), task(loop)], tokenizer_of("qwen3"))
    assert "not append-only" in told
    assert "old reasoning" in told


def test_a_single_turn_asks_nothing_of_the_template() -> None:
    assert check_templates([task(SingleTurnAgentLoopConfig())], tokenizer_of("gemma")) == []


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"parser": "hermse"}, "parser: there is no parser 'hermse'"),
        ({"tools": ["no.such.tool"]}, "cannot be loaded"),
        ({"tools": [calculator, calculator]}, "two tools have the name 'calculator'"),
        ({"tool_config_path": "absent.yaml"}, "absent.yaml cannot be read"),
        ({"function_tool_path": "absent.py"}, "absent.py cannot be loaded"),
    ],
)
def test_what_is_wrong_with_tools_is_found_when_the_configuration_is_checked(fields: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ToolAgentLoopConfig(**fields).check()
