"""Tools that were written for verl, as they are: a YAML file of classes, and a Python file of decorated functions.

tools:
  - class_name: my_tools.Search          create / execute / release for each call; calc_reward is never called
    config: {type: native, ...}
    tool_schema: {type: function, function: {...}}

@function_tool
async def search(query: str) -> str: ...       returns str, dict, or (response, reward, metrics)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from penstock.agent_loop.tools import Deadline, FunctionTool, Tool, ToolLimits
from penstock.agent_loop.verl_names import stand_in
from penstock.config import dotted_name, import_name
from penstock.errors import ConfigError
from penstock.judger.worker import load_file
from penstock.rollout import RolloutState

_STAND_IN = "penstock.agent_loop.verl_names:stand_in"


def load_tool_config(path: str, limits: ToolLimits) -> Iterator[VerlTool]:
    """The tools of a YAML file. Raises ConfigError."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"tool_config_path {path} cannot be read: {error}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"tool_config_path {path} has no list `tools`")
    for number, entry in enumerate(entries):
        try:
            yield VerlTool(entry, limits)
        except ConfigError as error:
            raise ConfigError([f"{path}: tools[{number}]: {problem}" for problem in error.problems]) from error


def load_function_tools(path: str, limits: ToolLimits) -> Iterator[Tool]:
    """The decorated functions of a Python file. Raises ConfigError."""
    file = str(Path(path).resolve())
    for name, entry in _registered(path):
        schema = _plain(entry.tool_schema) if getattr(entry, "tool_schema", None) else None
        yield _VerlFunction(f"{file}:{entry.fn.__qualname__}", limits, name=name, schema=schema)


def verl_objects(tool_config_path: str | None, function_tool_path: str | None) -> list[Any]:
    """The tools of both files as verl's own loops get them. Raises ConfigError."""
    found: list[Any] = []
    if tool_config_path is not None:
        found += [tool.inner for tool in load_tool_config(tool_config_path, ToolLimits())]
    if function_tool_path is not None:
        found += [entry for _, entry in _registered(function_tool_path)]
    return found


def _registered(path: str) -> list[tuple[str, Any]]:
    """The entries of verl's registry that a Python file makes, with their names."""
    stand_in()
    try:
        module = load_file(str(Path(path).resolve()))
    except Exception as error:  # whatever a user's file raises when it is imported
        raise ConfigError(f"function_tool_path {path} cannot be loaded: {type(error).__name__}: {error}") from error
    registry = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    entries = [(name, entry) for name, entry in registry.items() if entry.fn.__module__ == module.__name__]
    if not entries:
        raise ConfigError(f"function_tool_path {path} has no function with the decorator @function_tool")
    return entries


class _VerlFunction(FunctionTool):
    def __init__(self, handler: str, limits: ToolLimits, *, name: str, schema: Mapping[str, Any] | None) -> None:
        super().__init__(handler, limits, schema=schema, first=_STAND_IN)
        self.schema["function"] = {**self.schema["function"], "name": name}

    async def call(self, arguments: dict[str, Any], rollout: RolloutState) -> Any:
        return _response(await super().call(arguments, rollout))


class VerlTool:
    """An object of a tool's class, made once; `create`, `execute` and `release` are called for each call."""

    def __init__(self, entry: Any, limits: ToolLimits) -> None:
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise ConfigError("it has no class_name")
        config = dict(entry.get("config") or {})
        if config.get("type", "native") != "native":
            raise ConfigError(f"config.type is {config['type']!r}; only native tools are run here")
        stand_in()
        self.inner = self._make(entry["class_name"], config, entry.get("tool_schema"))
        self.schema = _plain(self.inner.tool_schema)
        self._deadline = Deadline(limits.timeout_s)
        parameters = inspect.signature(self.inner.execute).parameters.values()
        self._takes_data = any(p.name == "agent_data" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    async def call(self, arguments: dict[str, Any], rollout: RolloutState) -> Any:
        return _response(await self._deadline.keep(self._run(arguments, rollout), name=f"tool {self.name}"))

    async def _run(self, arguments: dict[str, Any], rollout: RolloutState) -> Any:
        every = rollout.extra_info.get("tools_kwargs") or {}
        own = every.get(self.name) or {}
        created = await self.inner.create(create_kwargs=own.get("create_kwargs", {}))
        instance = created[0] if isinstance(created, tuple) else created
        extra = {"agent_data": _agent_data(rollout, every)} if self._takes_data else {}
        try:
            return await self.inner.execute(instance, arguments, **extra)
        finally:
            await self.inner.release(instance)

    async def close(self) -> None:
        self._deadline.close()

    def _make(self, class_name: str, config: dict[str, Any], schema: Any) -> Any:
        from verl.tools.schemas import OpenAIFunctionToolSchema  # type: ignore[import-not-found, unused-ignore]

        cls = import_name(class_name)
        try:
            described = OpenAIFunctionToolSchema.model_validate(schema) if schema is not None else None
            tool = cls(config=config, tool_schema=described)
        except Exception as error:  # a user's constructor may raise anything
            raise ConfigError(f"{dotted_name(cls)} cannot be made: {type(error).__name__}: {error}") from error
        for name in ("create", "execute", "release"):
            if not inspect.iscoroutinefunction(inspect.unwrap(getattr(tool, name, object))):
                raise ConfigError(f"{dotted_name(cls)} has no async method {name!r}")
        if getattr(tool, "tool_schema", None) is None:
            raise ConfigError(f"{dotted_name(cls)} has no tool_schema, and the file gives none")
        return tool


def _agent_data(rollout: RolloutState, tools_kwargs: Mapping[str, Any]) -> SimpleNamespace:
    """What verl's own loop hands to `execute` beside the arguments, as far as there is such a thing here."""
    return SimpleNamespace(
        messages=list(rollout.messages),
        request_id=rollout.rollout_id,
        tools_kwargs=tools_kwargs,
        extra_fields={},
        metrics={},
    )


def _plain(schema: Any) -> dict[str, Any]:
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_unset=True, exclude_none=True)
    return dict(schema)


def _response(said: Any) -> Any:
    """The text of a ToolResponse, or of the first of (response, reward, metrics)."""
    if isinstance(said, tuple | list) and len(said) == 3 and isinstance(said[1], int | float | None):
        said = said[0]
    if hasattr(said, "text"):
        return said.text or ""
    if isinstance(said, dict) and set(said) == {"text"}:
        return said["text"]
    return said
