"""Tool calls out of what a model wrote, in the format of its family.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>       Hermes, Qwen 2.5, Qwen 3
    qwen3_coder   <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
    llama3_json   {"name": ..., "parameters": {...}}; several between semicolons; <|python_tag|> before them
    json          the whole answer is such an object, or a list of them, perhaps in a ```json block

A parser is a function from the answer's text to a `Parsed`; a user's own is given by its dotted path. It raises nothing
for bad text: a call that cannot be read is a call with a problem, which the model is told.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from penstock.config import dotted_name, import_name, nearest
from penstock.errors import ConfigError


class ToolCall(msgspec.Struct, frozen=True):
    """One call that a model asked for."""

    name: str
    arguments: dict[str, Any] = {}
    problem: str = ""
    """Why it cannot be made: what the model is told. The name is empty when not even that could be read."""


class Parsed(msgspec.Struct, frozen=True):
    content: str
    """What the model said beside its calls."""
    calls: tuple[ToolCall, ...] = ()


Parser = Callable[[str], Parsed]

# Each is tried in a time that grows with the text and no faster: models repeat themselves, white space above all, and
# parsers run in the event loop.
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
_PARAMETER_END = "</parameter>"
_FENCE = "```"
_DECODER = json.JSONDecoder()


def hermes(text: str) -> Parsed:
    calls = tuple(_call_of(block) for block in _BLOCK.findall(text))
    return Parsed(_BLOCK.sub("", text).strip() if calls else text, calls)


def qwen3_coder(text: str) -> Parsed:
    calls: list[ToolCall] = []
    for block in _BLOCK.findall(text):
        functions = _FUNCTION.findall(block)
        if not functions:
            calls.append(ToolCall("", problem="there is no <function=name> in the call"))
        for name, body in functions:
            problem = "" if name.strip() else "the function has no name"
            calls.append(ToolCall(name.strip(), dict(_parameters(body)), problem))
    return Parsed(_BLOCK.sub("", text).strip() if calls else text, tuple(calls))


def llama3_json(text: str) -> Parsed:
    begin = text.find("<|python_tag|>")
    said, rest = (text[:begin], text[begin + len("<|python_tag|>") :]) if begin >= 0 else ("", text)
    rest = rest.strip()
    if begin < 0 and not rest.startswith("{"):
        return Parsed(text)
    calls: list[ToolCall] = []
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            calls.append(ToolCall(_name_in(rest), problem=f"it is no JSON: {error}"))
            break
        calls.append(_call_from(value))
        rest = rest[end:].lstrip("; \n")
    return _unless_plain(text, said.strip(), calls)


def plain_json(text: str) -> Parsed:
    body = _unfenced(text.strip())
    if not body.startswith(("{", "[")):
        return Parsed(text)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return _unless_plain(text, "", [ToolCall(_name_in(body), problem=f"it is no JSON: {error}")])
    return _unless_plain(text, "", [_call_from(item) for item in (value if isinstance(value, list) else [value])])


PARSERS: dict[str, Parser] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3_json,
    "json": plain_json,
}


_BEGINNINGS: dict[Parser, tuple[str, ...]] = {
    hermes: ("<tool_call>",),
    qwen3_coder: ("<tool_call>",),
    llama3_json: ("<|python_tag|>", "{"),
    plain_json: ("{", "[", "```"),
}


def call_beginnings(parser: Parser) -> tuple[str, ...]:
    """Words before which nothing of an answer is a call; none where that is not known, as of a user's parser."""
    return _BEGINNINGS.get(parser, ())


def find_parser(name: str | Parser) -> Parser:
    """By name, by dotted path, or the function itself. Raises ConfigError when there is none."""
    if callable(name):
        return name
    if name in PARSERS:
        return PARSERS[name]
    if "." not in name and ":" not in name:
        raise ConfigError(f"there is no parser {name!r}.{nearest(name, list(PARSERS))} A dotted path works too.")
    found = import_name(name)
    if not callable(found):
        raise ConfigError(f"{name} is {dotted_name(found)}; a parser is a function from a text to a Parsed")
    parser: Parser = found
    return parser


def _call_of(block: str) -> ToolCall:
    try:
        return _call_from(json.loads(block))
    except (ValueError, RecursionError) as error:
        return ToolCall(_name_in(block), problem=f"it is no JSON: {error}")


def _call_from(value: Any) -> ToolCall:
    """Of an object with `name` and `arguments` (or `parameters`), which may be JSON in a text once more."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not _is_json(value["name"]):
        return ToolCall("", problem='a call is an object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(value["name"], problem=f"its arguments are no JSON: {error}")
    if not _is_json(arguments):
        return ToolCall(
            value["name"], problem="its arguments have what JSON has not: NaN, Infinity or half a character"
        )
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], problem=f"its arguments are {json.dumps(arguments)[:80]}, not an object")
    return ToolCall(value["name"], arguments)


def _parameters(body: str) -> Iterator[tuple[str, Any]]:
    """The values of XML parameters: JSON where they are, a Python literal where they are that, else text."""
    place = 0
    while (found := _PARAMETER.search(body, place)) and (end := body.find(_PARAMETER_END, found.end())) >= 0:
        yield found[1].strip(), _value(body[found.end() : end].removeprefix("\n").removesuffix("\n"))
        place = end + len(_PARAMETER_END)


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(value, bool | int | float | str | list | dict | None) and _is_json(value):
            return value
    return text


def _is_json(value: Any) -> bool:
    """Python reads and writes more than there is in JSON; clients, templates and records do not."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _unfenced(text: str) -> str:
    """What stands between ```json and ```, on lines of their own; the text itself where they do not."""
    if len(text) < 2 * len(_FENCE) or not (text.startswith(_FENCE) and text.endswith(_FENCE)):
        return text
    language, _, rest = text.removeprefix(_FENCE).removesuffix(_FENCE).partition("\n")
    body, newline, before_end = rest.rpartition("\n")
    return body.strip() if newline and not before_end.strip() and language.strip() in ("", "json") else text


def _name_in(text: str) -> str:
    found = re.search(r'"name"\s*:\s*"([^"]*)"', text)
    return found[1] if found else ""


def _unless_plain(text: str, said: str, calls: Sequence[ToolCall]) -> Parsed:
    """JSON that names no function at all is an answer, not a call."""
    return Parsed(said, tuple(calls)) if any(call.name for call in calls) else Parsed(text)
