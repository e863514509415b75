"""Tools that a model may call: a name, a JSON schema, and a call that ends in text.

A tool is an async Python function, or a plain one, which runs in worker processes. The schema comes from its type hints
and its docstring:

    async def weather(city: str, days: int = 1) -> str:
        \"\"\"The weather in a city.

        Args:
            city: Its name, such as Vienna.
            days: For how many days.
        \"\"\"

A parameter `extra_info` is not the model's: it gets that of the row. What a tool returns becomes text: a text as it is,
anything else as JSON. Whatever goes wrong is told to the model as text, and counted; it never ends the rollout.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Literal, Protocol

import msgspec
import pydantic

from penstock.agent_loop.parsers import ToolCall
from penstock.agent_loop.transcript import ToolAnswer
from penstock.config import dotted_name, nearest
from penstock.errors import ConfigError
from penstock.judger.failure import CallFailed
from penstock.judger.handler import Handler, is_async, locate_handler, resolve_handler
from penstock.judger.pool import PoolLimits, WorkerPool
from penstock.rollout import RolloutState, storable

UNKNOWN_TOOL, BAD_CALL, RAISED, TIMEOUT = "unknown_tool", "bad_call", "raised", "timeout"
ROW = "extra_info"
"""The parameter that gets the row's extra information."""

MAX_WAIT_S = 600.0
"""How long a call may wait for a free worker."""

Cut = Literal["start", "middle", "end"]


class Tool(Protocol):
    """What a model may call."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and OpenAI's API have it: {"type": "function", "function": {...}}."""
        ...

    async def call(self, arguments: dict[str, Any], rollout: RolloutState) -> Any:
        """What the tool says, within its deadline.

        Raises BadArguments when the arguments do not fit, TooSlow, and whatever the tool raises.
        """
        ...

    async def close(self) -> None: ...


class BadArguments(Exception):
    pass


class TooSlow(Exception):
    pass


class ToolLimits(msgspec.Struct, frozen=True, kw_only=True):
    timeout_s: float = 30.0
    """Of one call, from when it begins."""
    num_workers: int = 2
    """Processes for each plain function."""
    max_text: int = 4096
    """Characters of an answer."""
    cut: Cut = "middle"
    """Where a longer one loses the rest."""


class Deadline:
    """Calls in tasks of their own: one that does not end when its time is up is left behind."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._left: set[asyncio.Task[Any]] = set()

    async def keep(self, call: Coroutine[Any, Any, Any], *, name: str) -> Any:
        """What the call returns, or raises. Raises TooSlow when time is up."""
        task = asyncio.get_running_loop().create_task(call, name=name)
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            if not task.done():
                task.cancel()
                self._left.add(task)
                task.add_done_callback(self._forget)
        if not task.done():
            raise TooSlow
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it

    def close(self) -> None:
        for task in self._left:
            task.cancel()


class FunctionTool:
    """A Python function as a tool. Raises ConfigError when it cannot be one."""

    def __init__(
        self, handler: Handler, limits: ToolLimits, *, schema: Mapping[str, Any] | None = None, first: str = ""
    ) -> None:
        """`schema` overrides that of the hints. `first`, `module:function`, is called first by a worker."""
        function = resolve_handler(handler)
        self._function = function
        self._model = _arguments_model(function)
        self._takes_row = ROW in inspect.signature(function).parameters
        self.schema = dict(schema) if schema is not None else _schema(function, self._model)
        self._deadline = Deadline(limits.timeout_s)
        self._pool: WorkerPool | None = None
        if not is_async(function):
            setup = msgspec.structs.replace(locate_handler(handler), kind="value", first=first)
            self._pool = WorkerPool(setup, PoolLimits(num_workers=limits.num_workers, timeout_s=limits.timeout_s))

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    async def call(self, arguments: dict[str, Any], rollout: RolloutState) -> Any:
        try:
            given = self._model(**arguments)
        except pydantic.ValidationError as error:
            raise BadArguments("; ".join(_explained(error))) from None
        # Plain data: what a model asked for, not objects of the hints.
        named = {name: value for name, value in given.model_dump(mode="json").items() if name in given.model_fields_set}
        if self._takes_row:
            named[ROW] = dict(rollout.extra_info)
        if self._pool is None:
            return await self._deadline.keep(self._function(**named), name=f"tool {self.name}")
        reply = await self._in_a_worker(self._pool, named)
        if "unjudged" in reply:
            raise RuntimeError(reply["unjudged"])
        return reply["value"]

    async def _in_a_worker(self, pool: WorkerPool, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return await pool.call(arguments, wait_until=asyncio.get_running_loop().time() + MAX_WAIT_S)
        except CallFailed as failure:
            raise (TooSlow if failure.cause == "timeout" else RuntimeError)(failure.reason) from None

    async def close(self) -> None:
        self._deadline.close()
        if self._pool is not None:
            await self._pool.close()


class Toolbox:
    """The tools of a loop, by name, each call within its limits."""

    def __init__(self, tools: Iterable[Tool], limits: ToolLimits) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ConfigError(f"two tools have the name {tool.name!r}; names must differ")
            self._tools[tool.name] = tool
        self._limits = limits

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        return tuple(tool.schema for tool in self._tools.values())

    async def answer(self, call: ToolCall, rollout: RolloutState) -> ToolAnswer:
        """What the model is told. Raises nothing."""
        tool = self._tools.get(call.name)
        if call.problem:
            return ToolAnswer(self._cut(f"Error: this call cannot be read: {call.problem}"), BAD_CALL)
        if tool is None:
            hint = nearest(call.name, list(self._tools))
            return ToolAnswer(self._cut(f"Error: there is no tool {call.name!r}.{hint}"), UNKNOWN_TOOL)
        try:
            said = as_text(await tool.call(call.arguments, rollout))
        except BadArguments as error:
            return ToolAnswer(self._cut(f"Error: bad arguments: {error}"), BAD_CALL)
        except TooSlow:
            return ToolAnswer(f"Error: no answer within {self._limits.timeout_s:g} s", TIMEOUT)
        except Exception as error:  # a tool may raise anything; the model is told
            return ToolAnswer(self._cut(f"Error: {type(error).__name__}: {error}"), RAISED)
        return ToolAnswer(self._cut(said))

    def _cut(self, text: str) -> str:
        return cut_text(storable(text), self._limits.max_text, self._limits.cut)

    async def close(self) -> None:
        for tool in self._tools.values():
            await tool.close()


def as_text(said: Any) -> str:
    """Of what a tool returned."""
    if isinstance(said, str):
        return said
    try:
        return json.dumps(said, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(said)


def cut_text(text: str, length: int, cut: Cut) -> str:
    """At most `length` characters of the text and a note of what was left out at its start, middle or end."""
    if len(text) <= length:
        return text
    note = f"[{len(text) - length} characters left out]"
    if cut == "start":
        return note + text[len(text) - length :]
    if cut == "end":
        return text[:length] + note
    half = length // 2
    return text[: length - half] + note + text[len(text) - half :]


@functools.lru_cache(maxsize=256)  # asked for by the configuration, the prompts and each loop
def _arguments_model(function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    """What the function takes, as fields."""
    described = _described(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # a hint may name anything
        raise ConfigError(f"{dotted_name(function)} is no tool: its type hints cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == ROW:
            continue
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise ConfigError(f"{dotted_name(function)} is no tool: parameter {name!r} cannot be given by its name")
        if name not in hints:
            raise ConfigError(f"{dotted_name(function)} is no tool: parameter {name!r} has no type hint")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[name] = (hints[name], pydantic.Field(default, description=described.get(name)))
    try:
        settings = pydantic.ConfigDict(extra="forbid", protected_namespaces=())
        return pydantic.create_model(function.__name__, __config__=settings, **fields)
    except Exception as error:  # pydantic's own types, of many kinds
        raise ConfigError(f"{dotted_name(function)} is no tool: {error}") from error


def _schema(function: Callable[..., Any], model: type[pydantic.BaseModel]) -> dict[str, Any]:
    try:
        parameters = _without_titles(model.model_json_schema())
    except Exception as error:  # pydantic's own types, of many kinds
        raise ConfigError(f"{dotted_name(function)} is no tool: its arguments have no JSON schema: {error}") from error
    parameters.pop("additionalProperties", None)
    parameters.pop("description", None)
    parameters.setdefault("properties", {})
    about = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": about, "parameters": parameters},
    }


def _without_titles(schema: Any) -> Any:
    """pydantic repeats every name as a title."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: {key: _without_titles(value) for key, value in item.items()}
        if name == "properties"
        else _without_titles(item)
        for name, item in schema.items()
        if not (name == "title" and isinstance(item, str))
    }


_PARAMETER = re.compile(r"^\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def _described(docstring: str) -> dict[str, str]:
    """The `Args:` of a docstring."""
    lines = docstring.splitlines()
    begin = next((place for place, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:")), None)
    found: dict[str, str] = {}
    if begin is None:
        return found
    indent, last = 0, ""
    for line in lines[begin + 1 :]:
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = indent or depth
        if depth < indent:
            break
        match = _PARAMETER.match(line) if depth == indent else None
        if match:
            last = match[1]
            found[last] = match[2].strip()
        elif last:
            found[last] = f"{found[last]} {line.strip()}".strip()
    return found


def _explained(error: pydantic.ValidationError) -> Iterable[str]:
    for detail in error.errors(include_url=False):
        place = ".".join(str(part) for part in detail["loc"])
        yield f"{place}: {detail['msg']}" if place else detail["msg"]
