"""Every configuration in docs/agents.md is checked, and its loops play."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from penstock.cli.config_file import load_config
from penstock.models.tiny_chat import _tokenizer
from penstock.models.tokenizer import HFTokenizer
from penstock.produce import load_prompts
from penstock.rollout import RolloutState, Status, Verdict
from penstock.testing import EngineScript, JudgerScript, ScriptedEngine, ScriptedJudger

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"## ([^\n]*)\n(?:(?!\n## ).)*?```python\n(.*?)```", (ROOT / "docs/agents.md").read_text(), re.S)
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
    titles = [title for title, _ in BLOCKS]
    assert titles == [
        "Your own agent loop in ten lines", "Tools", "Environments", "Coming with verl's loops and tools",
    ]  # fmt: skip


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
