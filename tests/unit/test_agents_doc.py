"""Every block of code in docs/agents.md and docs/sessions.md: configurations are checked and their loops play, commands
name what there is, and the check of a record is made. The taskset of verifiers is trained in tests/verifiers."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from chat_families import tokenizer_of
from random_conversations import converse
from refeed_models import save_random_model, with_another_token
from session_clients import Noted

from penstock.cli import main
from penstock.cli.config_file import load_config
from penstock.engine import EmbeddedEngineConfig
from penstock.models.tiny_chat import _tokenizer
from penstock.models.tokenizer import HFTokenizer
from penstock.produce import load_prompts
from penstock.rollout import RolloutState, SampleParams, Status, Verdict
from penstock.testing import EngineScript, JudgerScript, RefeedMismatch, ScriptedEngine, ScriptedJudger

ROOT = Path(__file__).parents[2]
FOUND = [
    (title, language, code)
    for page in ("agents.md", "sessions.md")
    for section in re.split(r"^#+ ", (ROOT / "docs" / page).read_text(), flags=re.M)
    for title in section.split("\n")[:1]
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", section, re.S | re.M)
]
VERIFIERS, CHECKING = "A taskset of verifiers", "Checking a record"
BLOCKS = [
    (title, code) for title, language, code in FOUND if language == "python" and title not in (VERIFIERS, CHECKING)
]
COMMANDS = [line.partition("#")[0].split() for _, language, code in FOUND if not language for line in code.splitlines()]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'

FILES = {
    "tools.yaml": "tools: [{class_name: doc_tools.Note, config: {type: native}, tool_schema: {type: function, "
    "function: {name: note, description: Notes., parameters: {type: object, properties: {}, required: []}}}}]\n",
    "doc_tools.py": "from verl.tools.base_tool import BaseTool\n\n\nclass Note(BaseTool):\n"
    "    async def execute(self, instance_id, parameters, **kwargs):\n        return 'noted', 0.0, {}\n",
    "function_tools.py": "from verl.tools.function_tool import function_tool\n\n\n@function_tool\n"
    'async def calculator(expression: str) -> str:\n    """Adds.\n\n    Args:\n        expression: What.\n    """\n'
    "    return str(sum(map(int, expression.split('+'))))\n",
}


def test_every_section_that_shows_code_is_here():
    assert [(title, language) for title, language, _ in FOUND] == [
        ("Your own agent loop in ten lines", "python"),
        ("Tools", "python"),
        ("Environments", "python"),
        ("Coming with verl's loops and tools", "python"),
        ("Train the agent you already have", "python"),
        ("Train the agent you already have", ""),
        (VERIFIERS, ""),
        (VERIFIERS, "python"),
        ("Trying a model", ""),
        (CHECKING, "python"),
    ]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_is_one(command, capsys):
    if command[0] == "make":
        assert re.search(rf"^{command[1]}:", (ROOT / "Makefile").read_text(), re.M)
    elif command[:2] == ["penstock", "train"]:
        load_config(command[2]).check()  # tests/e2e/test_agents.py trains them
    else:
        assert command == ["penstock", "serve", "runs/quickstart"]  # tests/e2e/test_agents.py serves a run
        assert main(command[1:]) == 2
        assert "runs/quickstart" in capsys.readouterr().err


def test_the_checks_of_a_record_are_made(tmp_path):
    """As they stand there, with a real engine; with one token changed both fail."""
    code = next(code for title, _, code in FOUND if title == CHECKING)
    imported, *calls = [line for line in code.splitlines() if line]
    assert len(calls) == 2
    save_random_model(tmp_path, "qwen2.5")

    async def check(engine: Any, call: str) -> None:
        names: dict[str, Any] = {}
        exec(f"{imported}\nasync def check(engine, rollouts):\n    {call}", names)
        params = SampleParams(temperature=0.0 if "greedy=True" in call else 1.0, max_tokens=16)
        talk, _ = await converse("qwen2.5", 1, 2, engine=Noted(engine), params=params)
        await names["check"](engine, [talk.rollout])
        with pytest.raises(RefeedMismatch):
            await names["check"](engine, [with_another_token(talk.rollout, 0, 0)])

    async def check_all() -> None:
        engine = EmbeddedEngineConfig().build(str(tmp_path), tokenizer_of("qwen2.5"), deterministic=True, threads=1)
        try:
            for call in calls:
                await check(engine, call)
        finally:
            await engine.close()

    asyncio.run(check_all())


@pytest.mark.parametrize(("title", "code"), BLOCKS, ids=[title.replace(" ", "-") for title, _ in BLOCKS])
def test_the_configuration_is_one_and_its_loops_play(title, code, tmp_path, monkeypatch):
    name = f"doc_{BLOCKS.index((title, code))}_run.py"
    for file, text in {**FILES, name: code}.items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(name)
    config.check()
    inner = _tokenizer()
    tokenizer = HFTokenizer(inner, frozenset({inner.eos_token_id}), tmp_path)
    tasks = config.manager.task_list
    prompts = load_prompts(tasks, tokenizer, context=2048)
    for task in tasks:
        [rollout] = asyncio.run(
            _play(task, prompts[task.task_name].prompts[0], tokenizer, "7" if title == "Environments" else CALL)
        )
        assert rollout.status is Status.COMPLETED, rollout.error
        assert isinstance(rollout.reward, Verdict)
        assert len([turn for turn in rollout.turns if turn.kind == "generate"]) >= 2
        if title == "Tools":
            assert [turn.text for turn in rollout.turns if turn.kind == "tool"] == ["46"]


async def _play(task, prompt, tokenizer, first):
    words = iter([first, "46", "46"])

    def answers(request):
        return [*tokenizer.encode(next(words)), min(tokenizer.stop_ids)]

    loop = task.agent_loop_config.build(
        engine=ScriptedEngine(EngineScript(tokens_per_s=1e6, answers=answers)),
        tokenizer=tokenizer,
        judger=ScriptedJudger(JudgerScript()) if task.judger_config is not None else None,
    )
    rollout = RolloutState(prompt=prompt, task_name=task.task_name, group_id="g", rollout_id="g:0")
    try:
        return await loop.generate_group([rollout], enable_partial_rollout=False)
    finally:
        await loop.close()
