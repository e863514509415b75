"""Agent loops as users run them: from a configuration file, with a real model, real gradients, real processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.config_file import load_config
from penstock.models.tiny_chat import make_tiny_chat
from penstock.trainer.trajectories import read_trajectories

ALL_LOOPS = '''
"""Tools, an environment and a loop written for verl, side by side."""

import string

from penstock import (
    AdditionConfig, EmbeddedEngineConfig, EnginesConfig, EnvAgentLoopConfig, RLColocateTrainerConfig,
    SampleParams, SamplerConfig, TaskSpecConfig, ToolAgentLoopConfig, TrainWorkerConfig, VerlAgentLoopConfig,
    calculator,
)

sums = SamplerConfig(dataset=AdditionConfig(max_number=9, template="{a}+{b}=?", held_out=0), prompt_repeat_k=2)
# The model was hardly taught, and does not know how to end an answer.
params = SampleParams(max_tokens=120, stop=tuple(string.ascii_letters + string.digits))


class Echo:
    """Two steps; what it says depends on the answer."""

    def reset(self, row):
        self.steps = 0

    def step(self, answer):
        self.steps += 1
        return answer[:3] or "?", len(answer) / 10, self.steps == 2


def length(response, label, extra_info):
    return {"score": float(len(response)), "turns": len(extra_info.get("turns", []))}


trainer = RLColocateTrainerConfig(
    model="model",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=16)),
    train=TrainWorkerConfig(lr=1e-3),
    tasks=[
        TaskSpecConfig(
            task_name="tools",
            sampler_config=sums,
            agent_loop_config=ToolAgentLoopConfig(
                tools=[calculator], parser="my_parser.every_word", max_turns=2, max_tokens_per_turn=16,
                tool_timeout_s=20, max_parallel_calls=2, max_tool_text=40, cut_tool_text="end", sample_params=params,
            ),
            judger_config=length,
        ),
        TaskSpecConfig(
            task_name="verl_tools",
            sampler_config=sums,
            agent_loop_config=ToolAgentLoopConfig(
                tool_config_path="tools.yaml", function_tool_path="function_tools.py",
                parser="my_parser.every_word", max_turns=2, max_tokens_per_turn=16, sample_params=params,
            ),
            judger_config=length,
        ),
        TaskSpecConfig(
            task_name="env",
            sampler_config=sums,
            agent_loop_config=EnvAgentLoopConfig(
                env=Echo, max_turns=3, max_tokens_per_turn=16, num_env_workers=1, sample_params=params,
            ),
        ),
        TaskSpecConfig(
            task_name="verl",
            sampler_config=sums,
            agent_loop_config=VerlAgentLoopConfig(path="verl_loops.TwoGuesses", sample_params=params),
        ),
    ],
    trackers=[],
    total_steps=1,
    train_batch_size=4,
    seed=0,
)
'''

PARSER = """
from penstock.agent_loop.parsers import Parsed, ToolCall


def every_word(text):
    return Parsed("", (ToolCall("calculator", {"expression": "1+1"}), ToolCall("note", {"word": text[:2] or "?"})))
"""

TOOLS = """
tools:
  - class_name: my_tools.Note
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: note
        description: Notes.
        parameters: {type: object, properties: {word: {type: string}}, required: [word]}
"""

TOOL_CLASS = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Note(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="noted"), 0.0, {}
"""

FUNCTION_TOOLS = '''
from verl.tools.function_tool import function_tool


@function_tool
def calculator(expression: str) -> str:
    """Calculates.

    Args:
        expression: What.
    """
    return "2"
'''


@pytest.mark.long_tier
@pytest.mark.timeout(300)
def test_every_loop_trains_from_a_configuration_file(tmp_path, penstock):
    (tmp_path / "model").mkdir()
    make_tiny_chat(tmp_path / "model", lessons=2)
    files = {
        "my_run.py": ALL_LOOPS,
        "my_parser.py": PARSER,
        "my_tools.py": TOOL_CLASS,
        "function_tools.py": FUNCTION_TOOLS,
        "tools.yaml": TOOLS,
        "verl_loops.py": (Path(__file__).parents[1] / "verl_loops.py").read_text(),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    run = penstock("train", "my_run.py", "--run-dir", "run")
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 0, output
    rollouts = read_trajectories(tmp_path / "run" / "trajectories" / "step-000001.jsonl")
    by_task = {name: [r for r in rollouts if r.task == name] for name in ("tools", "verl_tools", "env", "verl")}
    assert {name: len(found) for name, found in by_task.items()} == dict.fromkeys(by_task, 2)
    said = [(turn.name, turn.text, turn.outcome) for turn in by_task["tools"][0].turns if turn.kind == "tool"]
    assert ("calculator", "2", "") in said
    assert any(name == "note" and outcome == "unknown_tool" for name, _, outcome in said)
    assert "calculator(expression)" in by_task["tools"][0].rendered_prompt
    said = [(turn.name, turn.text) for turn in by_task["verl_tools"][0].turns if turn.kind == "tool"]
    assert said[:2] == [("calculator", "2"), ("note", "noted")]
    assert all(rollout.reward.parts["steps"] == 2 for rollout in by_task["env"])
    for rollout in by_task["tools"] + by_task["env"]:
        [segment] = rollout.segments
        written = sum(turn.num_tokens for turn in rollout.turns if turn.kind == "generate")
        assert segment.token_mask.sum() == written
        trainer_logprobs = segment.token_trainer_logprobs
        trained = segment.token_mask == 1
        assert np.allclose(trainer_logprobs[trained], segment.token_logprobs[trained], atol=1e-3)


def rewards_of(run_dir: Path, name: str = "reward/mean") -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def assert_rises(run_dir: Path, name: str = "reward/mean", by: float = 0.3) -> None:
    rewards = rewards_of(run_dir, name)
    first, last = np.mean(rewards[:2]), np.mean(rewards[-5:])
    assert last - first >= by, f"{name} {first:.3f} -> {last:.3f}"


@pytest.mark.usefixtures("tiny_chat")
@pytest.mark.long_tier
@pytest.mark.timeout(900)
def test_tools_tiny_learns_to_ask_the_calculator(tmp_path, penstock):
    # The first 12 of its 30 steps: so much is learned by then.
    settings = ("--set", "total_steps=12", "--set", "evaluator.eval_sample_num=20")
    run = penstock("train", "tools-tiny", "--run-dir", "run", *settings)
    output, _ = run.communicate(timeout=880)
    assert run.returncode == 0, output
    assert_rises(tmp_path / "run")
    assert_rises(tmp_path / "run", "reward/parts/called_rightly")


@pytest.mark.usefixtures("tiny_chat")
@pytest.mark.soak_tier
@pytest.mark.timeout(900)
def test_guess_tiny_learns_to_listen(tmp_path, penstock):
    run = penstock("train", "guess-tiny", "--run-dir", "run")
    output, _ = run.communicate(timeout=880)
    assert run.returncode == 0, output
    assert_rises(tmp_path / "run")


@pytest.mark.usefixtures("tiny_chat")
@pytest.mark.long_tier
@pytest.mark.timeout(900)
def test_a_loop_written_for_verl_trains(tmp_path, penstock):
    (tmp_path / "verl_loops.py").write_text((Path(__file__).parents[1] / "verl_loops.py").read_text())
    (tmp_path / "my_run.py").write_text(
        "from penstock import SampleParams, VerlAgentLoopConfig\n"
        "from penstock.recipes.tools_tiny import trainer as tools\n"
        "loop = VerlAgentLoopConfig(path='verl_loops.CalculatorLoop', sample_params=SampleParams(max_tokens=64))\n"
        "trainer = tools.replace('evaluator', None).replace('manager.tasks.0.agent_loop_config', loop)\n"
        "trainer = trainer.replace('total_steps', 12)\n"
    )
    run = penstock("train", "my_run.py", "--run-dir", "run")
    output, _ = run.communicate(timeout=880)
    assert run.returncode == 0, output
    assert_rises(tmp_path / "run")


@pytest.mark.parametrize("name", ["tools-tiny", "tools-smollm2", "guess-tiny"])
def test_a_recipe_with_an_agent_passes_its_check(name):
    load_config(name).check()
