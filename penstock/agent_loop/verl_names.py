"""What files written for verl import from it, for machines without verl.

`stand_in` puts modules of verl's names into `sys.modules` when there is no verl: the bases and records that users'
tools and agent loops are written against, and nothing that computes. Other names of verl's cannot be imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import importlib.util
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pydantic


class Settings(dict[str, Any]):
    """A tree of settings that is read as verl's: by attribute, by key, with `get`."""

    def __init__(self, values: Mapping[str, Any] = types.MappingProxyType({}), path: str = "trainer_config") -> None:
        below = {
            name: Settings(value, f"{path}.{name}") if isinstance(value, Mapping) else value
            for name, value in values.items()
        }
        super().__init__(below)
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._path}.{name} is not set; give it in the loop's configuration, under trainer_config"
        )


class Wrapped:
    """verl hands settings over in such a box."""

    def __init__(self, config: Settings) -> None:
        self.config = config


class AgentLoopMetrics(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


class AgentLoopOutput(pydantic.BaseModel):
    """What a loop's `run` returns, once or in a list."""

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="allow")

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = AgentLoopMetrics()
    extra_fields: dict[str, Any] = {}


class TokenOutput(pydantic.BaseModel):
    """What `server_manager.generate` returns."""

    model_config = pydantic.ConfigDict(extra="allow")

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = {}


class AgentLoopBase:
    """What a loop written for verl inherits from."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        **_rest: Any,
    ) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config.config if data_config is not None else Settings({}, "data_config")
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs", {})
        self.loop = asyncio.get_running_loop()

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {}

    process_multi_modal_info = process_vision_info

    async def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **_media: Any
    ) -> list[int]:
        ids = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self.apply_chat_template_kwargs,
        )
        return list(ids)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        raise NotImplementedError


class _OpenSchema(pydantic.BaseModel):
    """Verl's records of a schema, any further key allowed."""

    model_config = pydantic.ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_OpenSchema):
    type: Any = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_OpenSchema):
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_OpenSchema):
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()


class OpenAIFunctionToolSchema(_OpenSchema):
    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(_OpenSchema):
    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """What a tool's class written for verl inherits from."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_rest: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_rest: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **_rest: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **_rest: Any) -> None:
        return


class FunctionTool:
    """An entry of the registry."""

    def __init__(self, name: str, fn: Callable[..., Any], tool_schema: Any = None) -> None:
        self.name = name
        self.fn = fn
        self.tool_schema = tool_schema


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}


def function_tool(name: Any = None, schema: Any = None) -> Any:
    """A decorator, with or without a name and a schema: the function is a tool."""

    def mark(fn: Callable[..., Any]) -> Callable[..., Any]:
        known = name if isinstance(name, str) else fn.__name__
        FUNCTION_TOOL_REGISTRY[known] = FunctionTool(known, fn, schema)
        return fn

    return mark(name) if callable(name) else mark


def register(_agent_name: str) -> Callable[[type], type]:
    """A decorator of agent loops. Here they are found by their path."""
    return lambda cls: cls


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@contextlib.contextmanager
def simple_timer(name: str, timings: dict[str, float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    timings[name] = timings.get(name, 0.0) + time.perf_counter() - started


_MODULES: dict[str, tuple[Any, ...]] = {
    "verl": (),
    "verl.experimental": (),
    "verl.experimental.agent_loop": (AgentLoopBase, AgentLoopOutput, AgentLoopMetrics, register),
    "verl.experimental.agent_loop.agent_loop": (
        AgentLoopBase, AgentLoopOutput, AgentLoopMetrics, TokenOutput, register,
    ),
    "verl.tools": (),
    "verl.tools.base_tool": (BaseTool, OpenAIFunctionToolSchema, ToolResponse),
    "verl.tools.function_tool": (FunctionTool, function_tool),
    "verl.tools.schemas": (
        OpenAIFunctionToolSchema, OpenAIFunctionSchema, OpenAIFunctionParametersSchema, OpenAIFunctionPropertySchema,
        ToolResponse,
    ),
    "verl.utils": (),
    "verl.utils.profiler": (simple_timer,),
    "verl.utils.rollout_trace": (rollout_trace_op,),
    "verl.workers": (),
    "verl.workers.rollout": (),
    "verl.workers.rollout.replica": (TokenOutput,),
}  # fmt: skip


def stand_in() -> None:
    """Make files written for verl importable where there is none. Does nothing where there is, or the second time."""
    if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
        return
    for name, contents in _MODULES.items():
        module = types.ModuleType(name, "Stands in for verl's; see penstock.agent_loop.verl_names.")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for item in contents:
            setattr(module, item.__name__, item)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules["verl.tools.function_tool"].FUNCTION_TOOL_REGISTRY = FUNCTION_TOOL_REGISTRY  # type: ignore[attr-defined]
