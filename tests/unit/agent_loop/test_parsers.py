from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.agent_loop.parsers import PARSERS, Parsed, ToolCall, find_parser
from penstock.errors import ConfigError

ADD = ToolCall("add", {"a": 1, "b": [2, "x"]})
AS_JSON = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'

WRITTEN = {
    "hermes": f"<tool_call>\n{AS_JSON}\n</tool_call>",
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        '<parameter=b>\n[2, "x"]\n</parameter>\n</function>\n</tool_call>'
    ),
    "llama3_json": AS_JSON.replace("arguments", "parameters"),
    "json": AS_JSON,
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_is_read_in_each_format(name: str) -> None:
    assert PARSERS[name](WRITTEN[name]) == Parsed("", (ADD,))


@pytest.mark.parametrize("name", PARSERS)
def test_an_answer_without_a_call_is_its_own_content(name: str) -> None:
    assert PARSERS[name]("  It is 4. ") == Parsed("  It is 4. ")
    assert PARSERS[name]("") == Parsed("")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_what_stands_beside_calls_is_the_content_and_several_calls_are_read(name: str) -> None:
    text = f"Let me see. {WRITTEN[name]}\n{WRITTEN[name]}"
    assert PARSERS[name](text) == Parsed("Let me see.", (ADD, ADD))


def test_several_calls_are_read_in_the_json_formats() -> None:
    one = WRITTEN["llama3_json"]
    assert PARSERS["llama3_json"](f"{one}; {one}").calls == (ADD, ADD)
    assert PARSERS["llama3_json"](f"So: <|python_tag|>{one}") == Parsed("So:", (ADD,))
    assert PARSERS["json"](f"[{AS_JSON}, {AS_JSON}]").calls == (ADD, ADD)
    assert PARSERS["json"](f"```json\n{AS_JSON}\n```").calls == (ADD,)


def test_a_call_that_was_cut_before_its_end_is_still_a_call() -> None:
    assert PARSERS["hermes"](f"<tool_call>\n{AS_JSON}").calls == (ADD,)


@pytest.mark.parametrize(
    ("name", "text", "called"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {</tool_call>', "add"),
        ("hermes", "<tool_call>add(1, 2)</tool_call>", ""),
        ("hermes", "<tool_call>[]</tool_call>", ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": 3}</tool_call>', "add"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "add"),
        ("qwen3_coder", "<tool_call>add</tool_call>", ""),
        ("llama3_json", '{"name": "add", "parameters": {', "add"),
        ("json", '{"name": "add", "arguments": {', "add"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_call_with_a_problem(name: str, text: str, called: str) -> None:
    [call] = PARSERS[name](text).calls
    assert call.problem
    assert (call.name, call.arguments) == (called, {})


def test_arguments_that_are_json_in_a_text_are_read_once_more() -> None:
    assert PARSERS["json"](json.dumps({"name": "add", "arguments": '{"a": 1, "b": [2, "x"]}'})).calls == (ADD,)


def test_json_that_names_no_function_is_an_answer() -> None:
    assert PARSERS["json"]('{"answer": 4}') == Parsed('{"answer": 4}')
    assert PARSERS["llama3_json"]('{"answer": 4}') == Parsed('{"answer": 4}')


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.text(alphabet='{}[]":,;abc<tool_call>/=\n 1', max_size=60))
def test_no_text_makes_a_parser_raise(name: str, text: str) -> None:
    parsed = PARSERS[name](text)
    assert all(call.problem or call.name for call in parsed.calls)
    assert PARSERS[name]("<tool_call>" + text).content is not None


def shouting(text: str) -> Parsed:
    return Parsed("", (ToolCall(text.upper()),))


def test_a_parser_is_found_by_name_by_path_and_as_itself() -> None:
    assert find_parser("hermes") is PARSERS["hermes"]
    assert find_parser(shouting) is shouting
    assert find_parser("penstock.agent_loop.parsers:plain_json") is PARSERS["json"]


@pytest.mark.parametrize(
    ("name", "told"),
    [("hermse", "Did you mean 'hermes'"), ("no.such.parser", "no.such"), ("penstock.__version__", "a function")],
)
def test_a_parser_that_is_none_is_refused(name: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        find_parser(name)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>a" + " " * 60_000 + "b",
        "<tool_call>" + "<function=" * 6_000,
        "<tool_call><function=f>" + "<parameter=a>" * 5_000,
        "```json" + "\n" * 60_000 + "x",
        "```json\n" + "\n " * 30_000 + "x```",
    ],
    ids=["spaces", "functions", "parameters", "lines", "lines in a block"],
)
def test_a_model_that_repeats_itself_holds_nobody_up(name: str, text: str) -> None:
    assert not any(call.arguments for call in PARSERS[name](text).calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", '<tool_call>{"name": "add", "arguments": "' + "[" * 100_000 + '"}'),
        ("llama3_json", '{"name": "add", "parameters":' + '{"a":' * 100_000),
        ("json", '{"name": "add", "arguments":' + "[" * 100_000),
    ],
)
def test_what_is_nested_without_end_is_a_call_that_cannot_be_read(name: str, text: str) -> None:
    (call,) = PARSERS[name](text).calls
    assert call.problem


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", r'"\ud800"'])
def test_arguments_that_json_has_not_are_a_problem(value: str) -> None:
    (call,) = PARSERS["hermes"](f'<tool_call>{{"name": "add", "arguments": {{"a": [{value}]}}}}</tool_call>').calls
    assert call.name == "add" and "JSON" in call.problem


@pytest.mark.parametrize("value", ["NaN", "[{1, 2}]", "[b'x']", "{'a': 1j}"])
def test_a_parameter_that_json_has_not_is_text(value: str) -> None:
    text = f"<tool_call><function=add><parameter=a>\n{value}\n</parameter></function></tool_call>"
    assert PARSERS["qwen3_coder"](text).calls == (ToolCall("add", {"a": value}),)
