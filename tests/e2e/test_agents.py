"""Agents as people have them, trained end to end: the clients of OpenAI and Anthropic, programs, services."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from penstock import LLMJudgerConfig, SampleParams
from penstock.rollout import new_rollout
from penstock.testing import check_ledger

CALCULATOR = """
import json, re

def calculate(arguments):
    numbers = re.fullmatch(r"(\\d+)\\+(\\d+)", str(arguments.get("expression")))
    return str(int(numbers[1]) + int(numbers[2])) if numbers else "?"

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
"""

AGENTS = {
    "openai": """
import openai

def agent(prompt, base_url, api_key):
    http = openai.DefaultHttpxClient(verify=False)
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]
    messages = [{"role": "user", "content": prompt}]
    with openai.OpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        for _ in range(3):
            message = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                result = calculate(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break
    return message.content or ""
""",
    "openai stream": """
import openai

async def agent(prompt, base_url, api_key):
    http = openai.DefaultAsyncHttpxClient(verify=False)
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]
    messages = [{"role": "user", "content": prompt}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        for _ in range(3):
            text, calls = "", []
            stream = await client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True)
            async for chunk in stream:
                delta = chunk.choices[0].delta
                text += delta.content or ""
                calls += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or ()]
            messages.append({"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}))
            for call in calls:
                result = calculate(json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not calls:
                break
    return text
""",
    "anthropic": """
import anthropic

async def agent(prompt, base_url, api_key):
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    tools = [{"name": "calculator", "input_schema": PARAMETERS}]
    messages = [{"role": "user", "content": prompt}]
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, http_client=http) as client:
        for _ in range(3):
            answer = await client.messages.create(model="m", max_tokens=48, messages=messages, tools=tools)
            messages.append({"role": "assistant", "content": answer.content})
            uses = [block for block in answer.content if block.type == "tool_use"]
            if not uses:
                break
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": calculate(use.input)} for use in uses
            ]
            messages.append({"role": "user", "content": results})
    return "".join(block.text for block in answer.content if block.type == "text")
""",
}

RUN = """
from penstock import (
    AdditionConfig, AsyncProduceStrategyConfig, EmbeddedEngineConfig, EndpointAgentLoopConfig, EnginesConfig,
    {trainer}, SampleParams, SamplerConfig, TaskSpecConfig, TrainWorkerConfig, exact_match,
)

trainer = {trainer}(
    model="tiny-chat",
    engines=EnginesConfig(engine=EmbeddedEngineConfig(max_running=64{process})),
    train=TrainWorkerConfig(lr=5e-4),
    tasks=[
        TaskSpecConfig(
            task_name="sums",
            sampler_config=SamplerConfig(
                dataset=AdditionConfig(template="{{a}}+{{b}}=?", max_number=99), prompt_repeat_k=8
            ),
            agent_loop_config=EndpointAgentLoopConfig(
                agent=agent, max_turns=4, sample_params=SampleParams(max_tokens=48)
            ),
            judger_config=exact_match,
            produce_strategy_config=AsyncProduceStrategyConfig(
                over_sample_threshold=0.25, enable_partial_rollout=True, max_staleness=1
            ),
        )
    ],
    total_steps={steps},
    train_batch_size=8,
    seed=0,
)
"""


def run_file(directory: Path, client: str, *, steps: int = 8, beside: bool = False) -> Path:
    trainer = "RLDisaggregatedTrainerConfig" if beside else "RLColocateTrainerConfig"
    text = RUN.format(trainer=trainer, process=", process=True" if beside else "", steps=steps)
    path = directory / "run_of_agents.py"
    path.write_text(CALCULATOR + AGENTS[client] + text)
    return path


def rewards(read_lines, run: Path) -> list[float]:
    return [line["reward/mean"] for line in read_lines(run / "metrics.jsonl") if "reward/mean" in line]


@pytest.mark.usefixtures("tiny_chat")
@pytest.mark.parametrize(
    "client",
    [
        pytest.param("openai", marks=pytest.mark.long_tier),
        # Streamed, one is trained below too, beside its producer.
        pytest.param("openai stream", marks=pytest.mark.soak_tier),
        pytest.param("anthropic", marks=pytest.mark.long_tier),
    ],
)
def test_an_unmodified_agent_is_trained(client, penstock, tmp_path, read_lines):
    run = penstock("train", str(run_file(tmp_path, client)), "--run-dir", "run")
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 0, output
    found = rewards(read_lines, tmp_path / "run")
    assert np.mean(found[-4:]) - np.mean(found[:1]) >= 0.3, found
    # The engine's logprobs of a conversation with tools are the trainer's: recorded ids are what the model saw.
    steps = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line]
    assert steps[0]["train/mismatch/max_abs"] < 1e-3
    rows = read_lines(tmp_path / "run" / "trajectories" / "step-000008.jsonl")
    assert any(len(row["turns"]) >= 3 for row in rows)
    check_ledger(tmp_path / "run").require_none()


@pytest.mark.usefixtures("tiny_chat")
@pytest.mark.soak_tier
@pytest.mark.parametrize("recipe", ["agent-openai", "agent-cli"])
def test_the_recipes_of_agents_learn(recipe, penstock, tmp_path, read_lines):
    run = penstock("train", recipe, "--run-dir", "run")
    output, _ = run.communicate(timeout=290)
    assert run.returncode == 0, output
    found = rewards(read_lines, tmp_path / "run")
    assert np.mean(found[-4:]) - np.mean(found[:1]) >= 0.3, found


@pytest.mark.usefixtures("tiny_chat")
@pytest.mark.long_tier
def test_an_agent_that_is_a_program_is_trained(penstock, tmp_path, read_lines):
    """With a process for each of its rollouts; that it learns is shown by a longer run."""
    run = penstock("train", "agent-cli", "--run-dir", "run", "--set", "total_steps=2", "--set", "train_batch_size=2")
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 0, output
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[0]["train/mismatch/max_abs"] < 1e-3 and steps[0]["train/grad_norm"] > 0
    rows = read_lines(tmp_path / "run" / "trajectories" / "step-000002.jsonl")
    assert len(rows) == 16 and any(len(row["turns"]) >= 3 for row in rows)
    check_ledger(tmp_path / "run").require_none()


@pytest.mark.usefixtures("tiny_chat")
@pytest.mark.long_tier
def test_weights_that_change_in_the_middle_of_a_conversation_are_invisible_to_the_agent(penstock, tmp_path, read_lines):
    run = penstock("train", str(run_file(tmp_path, "openai stream", steps=10, beside=True)), "--run-dir", "run")
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 0, output
    found = rewards(read_lines, tmp_path / "run")
    assert np.mean(found[-4:]) - np.mean(found[:1]) >= 0.3, found
    rows = [row for path in (tmp_path / "run" / "trajectories").glob("step-*.jsonl") for row in read_lines(path)]
    assert any(len(row["model_steps"]) > 1 for row in rows)


KILLED = """
import asyncio
from pathlib import Path

from penstock import (
    AdditionConfig, EmbeddedEngineConfig, EndpointAgentLoopConfig, EnginesConfig, RLColocateTrainerConfig,
    SampleParams, SamplerConfig, TaskSpecConfig, TrainWorkerConfig,
)

HERE = Path({here!r})


class NotedEngineConfig(EmbeddedEngineConfig):
    def build(self, *arguments, **options):
        return Noted(super().build(*arguments, **options))


class Noted:
    def __init__(self, engine):
        self._engine = engine

    async def generate(self, request):
        completion = await self._engine.generate(request)
        with (HERE / "engine.log").open("a") as log:
            log.write(f"{{request.request_id}} {{len(request.prompt_ids) // 4}}\\n")
        return completion

    def __getattr__(self, name):
        return getattr(self._engine, name)


async def three_turns(prompt, base_url, api_key):
    import httpx

    messages = []
    async with httpx.AsyncClient(headers={{"authorization": f"Bearer {{api_key}}"}}, timeout=60) as client:
        for question in (prompt, "1+1=?", "2+2=?"):
            messages.append({{"role": "user", "content": question}})
            answer = await client.post(f"{{base_url}}/chat/completions", json={{"model": "m", "messages": messages}})
            answer.raise_for_status()
            messages.append(answer.json()["choices"][0]["message"])
            with (HERE / "agent.log").open("a") as log:
                log.write(answer.json()["id"] + "\\n")
            while not (HERE / "go").exists():
                await asyncio.sleep(0.05)


def judge(response, label, extra_info):
    return float(len(response) % 2)


trainer = RLColocateTrainerConfig(
    model="tiny-chat",
    engines=EnginesConfig(engine=NotedEngineConfig()),
    train=TrainWorkerConfig(lr=1e-4),
    tasks=TaskSpecConfig(
        task_name="sums",
        sampler_config=SamplerConfig(dataset=AdditionConfig(template="{{a}}+{{b}}=?"), prompt_repeat_k=4),
        agent_loop_config=EndpointAgentLoopConfig(agent=three_turns, sample_params=SampleParams(max_tokens=48)),
        judger_config=judge,
    ),
    total_steps=2,
    train_batch_size=2,
    seed=0,
)
"""


@pytest.mark.usefixtures("tiny_chat")
@pytest.mark.long_tier
def test_after_a_kill_in_the_middle_of_conversations_finished_turns_are_not_asked_again(penstock, tmp_path, read_lines):
    (tmp_path / "killed_run.py").write_text(KILLED.format(here=str(tmp_path)))
    run = penstock("train", "killed_run.py", "--run-dir", "run")
    log, deadline = tmp_path / "agent.log", time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") == 8):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    # Every agent has its first answer and waits; a turn is on disk before its response closes.
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=60)
    finished = (tmp_path / "engine.log").read_text().split("\n")[:-1]
    first_ids = set(log.read_text().split())
    assert len(set(finished)) == 8 == len(first_ids)
    (tmp_path / "go").touch()
    resumed = penstock("train", "killed_run.py", "--run-dir", "run", "--resume")
    output, _ = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, output
    asked = (tmp_path / "engine.log").read_text().split("\n")[:-1]
    # Two steps of eight rollouts of three turns, each asked once; the answers are found again under their names.
    assert len(asked) == len(set(asked)) == 48
    assert first_ids <= set(log.read_text().split()[8:])
    rows = [row for step in (1, 2) for row in read_lines(tmp_path / "run" / "trajectories" / f"step-{step:06}.jsonl")]
    assert [sum(turn["kind"] == "generate" for turn in row["turns"]) for row in rows] == [3] * 16
    assert {len(row["segments"]) for row in rows} == {1}
    check_ledger(tmp_path / "run").require_none()


async def _judged_by(base_url, key, response):
    """What a judge says that asks the served model to read an answer; the first letter is the rating."""
    config = LLMJudgerConfig(
        base_url=base_url,
        model="run",
        api_key=key,
        template="{response}>",
        pattern=r"\A(.)",
        choices={letter: float(worth) for worth, letter in enumerate("abcdefgh", 1)},
        sample_params=SampleParams(temperature=0.0, max_tokens=8),
    )
    judger = config.build()
    rollout = new_rollout("q", ground_truth="a")
    rollout.response_text = response
    try:
        return await judger.judge(rollout)
    finally:
        await judger.close()


@pytest.mark.long_tier
def test_a_trained_run_is_served_to_any_client(tiny_run, penstock):
    import openai

    server = penstock("serve", str(tiny_run), "--port", "0", "--max-tokens", "8")
    try:
        assert server.stdout is not None
        assert any(line.startswith("serving run") for line in server.stdout)
        lines = [server.stdout.readline() for _ in range(3)]
        base_url, key = lines[0].split()[-1], lines[1].split()[-1]
        assert lines[2].split()[:2] == ["curl", f"{base_url}/chat/completions"]
        with openai.OpenAI(base_url=base_url, api_key=key) as client:
            ask = client.chat.completions.create
            answer = ask(model="m", messages=[{"role": "user", "content": "fead>"}], temperature=0)
            assert answer.choices[0].message.content == "daef"
            streamed = ask(model="m", messages=[{"role": "user", "content": "fead>"}], temperature=0, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "daef"
            assert [model.id for model in client.models.list()] == ["run"]
            with pytest.raises(openai.BadRequestError, match="temperature is -1"):
                ask(model="m", messages=[{"role": "user", "content": "fead>"}], temperature=-1)
        judged = asyncio.run(_judged_by(base_url, key, "fead"))
        assert (judged.score, judged.text) == (4.0, "daef")
        with (
            openai.OpenAI(base_url=base_url, api_key="wrong") as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()
        server.send_signal(signal.SIGINT)
        output, _ = server.communicate(timeout=60)
        assert server.returncode == 0, output
    finally:
        server.kill()
