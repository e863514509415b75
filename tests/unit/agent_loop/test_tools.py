from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tool_functions
from hypothesis import given
from hypothesis import strategies as st

from penstock.agent_loop.parsers import ToolCall
from penstock.agent_loop.tool_loop import load_tools
from penstock.agent_loop.tools import FunctionTool, Toolbox, ToolLimits, cut_text
from penstock.agent_loop.transcript import ToolAnswer
from penstock.errors import ConfigError
from penstock.rollout import Prompt, RolloutState
from penstock.testing import run_virtual

LIMITS = ToolLimits(timeout_s=5.0)


def rollout_of(**extra_info: Any) -> RolloutState:
    return RolloutState(prompt=Prompt(extra_info=extra_info), rollout_id="t:0:0")


def answers(*calls: ToolCall, limits: ToolLimits = LIMITS, run: Any = run_virtual, **extra: Any) -> list[ToolAnswer]:
    async def main() -> list[ToolAnswer]:
        functions = {getattr(tool_functions, call.name) for call in calls if hasattr(tool_functions, call.name)}
        box = Toolbox([FunctionTool(function, limits) for function in functions], limits)
        try:
            return [await box.answer(call, rollout_of(**extra)) for call in calls]
        finally:
            await box.close()

    found: list[ToolAnswer] = run(main())
    return found


# Schemas.


def test_the_schema_of_a_function_comes_from_its_hints_and_its_docstring() -> None:
    assert FunctionTool(tool_functions.add, LIMITS).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers and says the sum.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first one, on two lines."},
                    "b": {"type": "integer", "description": "The second one.", "default": 1},
                },
                "required": ["a"],
            },
        },
    }


def test_a_schema_has_choices_lists_and_no_row() -> None:
    parameters = FunctionTool(tool_functions.colour, LIMITS).schema["function"]["parameters"]
    assert parameters["properties"]["name"] == {"enum": ["red", "blue"], "type": "string"}
    assert parameters["properties"]["shades"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    row = FunctionTool(tool_functions.row_of, LIMITS).schema["function"]["parameters"]
    assert row == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (tool_functions.unhinted, "'a' has no type hint"),
        (tool_functions.positional, "'words' cannot be given by its name"),
        ("tool_functions.nothing", "cannot be loaded"),
        (lambda: "", "it is a lambda"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(function: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FunctionTool(function, LIMITS)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools have the name 'add'"):
        Toolbox([FunctionTool(tool_functions.add, LIMITS)] * 2, LIMITS)


# Calls.


def test_a_tool_is_called_and_what_it_returns_becomes_text() -> None:
    said = answers(ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": "5"}), ToolCall("colour", {"name": "red"}))
    assert said == [ToolAnswer("3"), ToolAnswer("6"), ToolAnswer('{"name": "red", "shades": []}')]


def test_a_tool_may_ask_for_the_row() -> None:
    assert answers(ToolCall("row_of"), city="Vienna") == [ToolAnswer("Vienna")]


@pytest.mark.parametrize(
    ("call", "outcome", "told"),
    [
        (ToolCall("ad", {"a": 1}), "unknown_tool", "there is no tool 'ad'"),
        (ToolCall("add", {"a": "x"}), "bad_call", "a: "),
        (ToolCall("add", {"a": 1, "c": 2}), "bad_call", "c: "),
        (ToolCall("add", {}), "bad_call", "a: Field required"),
        (ToolCall("add", problem="it is no JSON"), "bad_call", "it is no JSON"),
        (ToolCall("", problem="it has no name"), "bad_call", "it has no name"),
        (ToolCall("breaks"), "raised", "ValueError: it is broken"),
        (ToolCall("hangs"), "timeout", "no answer within 5 s"),
        (ToolCall("stubborn"), "timeout", "no answer within 5 s"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model_and_named(call: ToolCall, outcome: str, told: str) -> None:
    [said] = answers(call)
    assert said.outcome == outcome
    assert said.text.startswith("Error: ") and told in said.text


def test_an_unknown_tool_is_answered_with_the_nearest() -> None:
    assert "Did you mean 'add'?" in answers(ToolCall("ad"), ToolCall("add", {"a": 1}))[0].text


def test_a_plain_function_runs_in_worker_processes_and_one_that_hangs_is_killed() -> None:
    calls = [ToolCall("plain", {"word": "ab"}), ToolCall("plain_breaks", {"word": "w"}), ToolCall("plain_hangs")]
    said = answers(*calls, limits=ToolLimits(timeout_s=1.0, num_workers=1), run=asyncio.run)
    assert [answer.outcome for answer in said] == ["", "raised", "timeout"]
    assert said[0].text == "abab"
    assert "KeyError" in said[1].text


def test_text_without_bytes_in_utf8_is_escaped() -> None:
    assert answers(ToolCall("\ud800"))[0].text.isascii()


# Cutting.


@given(st.text(max_size=50), st.integers(1, 60), st.sampled_from(["start", "middle", "end"]))
def test_a_text_keeps_its_length_or_is_cut_with_a_note(text: str, length: int, cut: Any) -> None:
    cut_down = cut_text(text, length, cut)
    note = f"[{len(text) - length} characters left out]"
    if len(text) <= length:
        assert cut_down == text
    else:
        before, _, after = cut_down.partition(note)
        assert len(before) + len(after) == length
        assert text.startswith(before) and text.endswith(after)
        assert (cut == "start") == (before == "") or length == 1
        assert (cut == "end") == (after == "") or length == 1


def test_a_long_answer_is_cut_where_it_is_asked_to_be() -> None:
    words = {where: cut_text("abcdefgh", 4, where) for where in ("start", "middle", "end")}  # type: ignore[arg-type]
    note = "[4 characters left out]"
    assert words == {"start": f"{note}efgh", "middle": f"ab{note}gh", "end": f"abcd{note}"}


# Tools written for verl.

FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool
async def double(word: str) -> tuple:
    """Doubles a word.

    Args:
        word: Any.
    """
    return word * 2, 0.5, {"length": len(word)}

@function_tool("sorted_word")
def sort_it(word: str) -> dict:
    """Sorts letters.

    Args:
        word: Any.
    """
    return {"sorted": "".join(sorted(word))}

def no_tool(word: str) -> str:
    return word
'''

CLASSES = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

STORY = []

class Notebook(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        made, response = await super().create(instance_id)
        STORY.append(("create", kwargs["create_kwargs"]))
        return made, response

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        STORY.append(("execute", parameters, kwargs["agent_data"].request_id))
        if parameters.get("word") == "bad":
            raise RuntimeError("refused")
        return ToolResponse(text=self.config["prefix"] + parameters["word"]), 1.0, {}

    async def calc_reward(self, instance_id, **kwargs):
        raise AssertionError("never called")

    async def release(self, instance_id, **kwargs):
        STORY.append(("release",))
"""

YAML = """
tools:
  - class_name: {module}.Notebook
    config: {{type: native, prefix: "> "}}
    tool_schema:
      type: function
      function:
        name: note
        description: Writes a word down.
        parameters:
          type: object
          properties: {{word: {{type: string, description: Which.}}}}
          required: [word]
"""


def test_a_file_of_functions_decorated_for_verl_runs_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "function_tools.py"
    file.write_text(FUNCTIONS)

    async def main() -> list[ToolAnswer]:
        box = Toolbox(load_tools((), None, str(file), LIMITS), LIMITS)
        assert [schema["function"]["name"] for schema in box.schemas] == ["double", "sorted_word"]
        calls = [ToolCall("double", {"word": "ab"}), ToolCall("sorted_word", {"word": "ba"})]
        try:
            return [await box.answer(call, rollout_of()) for call in calls]
        finally:
            await box.close()

    assert asyncio.run(main()) == [ToolAnswer("abab"), ToolAnswer('{"sorted": "ab"}')]


@pytest.fixture
def verl_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """The path of a tool file, and what its class noted."""
    import importlib

    name = f"verl_classes_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CLASSES)
    (tmp_path / "tools.yaml").write_text(YAML.format(module=name))
    monkeypatch.syspath_prepend(tmp_path)
    from penstock.agent_loop.verl_names import stand_in

    stand_in()
    return str(tmp_path / "tools.yaml"), importlib.import_module(name).STORY


def test_a_tool_of_a_verl_tool_file_is_created_executed_and_released_for_each_call(
    verl_tools: tuple[str, list[Any]],
) -> None:
    path, story = verl_tools

    async def main() -> list[ToolAnswer]:
        box = Toolbox(load_tools((), path, None, LIMITS), LIMITS)
        [schema] = box.schemas
        assert schema["function"]["parameters"]["properties"] == {"word": {"type": "string", "description": "Which."}}
        rollout = rollout_of(tools_kwargs={"note": {"create_kwargs": {"page": 3}}})
        return [await box.answer(ToolCall("note", {"word": word}), rollout) for word in ("hello", "bad")]

    assert run_virtual(main()) == [ToolAnswer("> hello"), ToolAnswer("Error: RuntimeError: refused", "raised")]
    one = [("create", {"page": 3}), ("execute", {"word": "hello"}, "t:0:0"), ("release",)]
    assert story == [*one, one[0], ("execute", {"word": "bad"}, "t:0:0"), one[2]]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("tools: []", "no list `tools`"),
        ("- a", "no list `tools`"),
        ("tools: [{class_name: nowhere.Tool}]", "'nowhere.Tool' cannot be imported"),
        ("tools: [{config: {}}]", "it has no class_name"),
        ("tools: [{class_name: collections.OrderedDict, config: {type: mcp}}]", "only native tools"),
        ("tools: [{class_name: tool_functions.add, config: {}}]", "cannot be made"),
        ("tools: {", "cannot be read"),
    ],
)
def test_a_tool_file_that_cannot_be_used_is_refused(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "tools.yaml").write_text(content)
    with pytest.raises(ConfigError, match=told):
        list(load_tools((), str(tmp_path / "tools.yaml"), None, LIMITS))


def test_a_file_of_functions_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        list(load_tools((), None, str(tmp_path / "absent.py"), LIMITS))
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="no function with the decorator"):
        list(load_tools((), None, str(tmp_path / "empty.py"), LIMITS))
