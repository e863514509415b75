"""ToolAgentLoop: the model answers, its calls are made, it is told what the tools said, and answers again.

    prompt -> answer with calls -> results -> answer with calls -> results -> answer

One conversation is one segment: what the model wrote is trained, what tools said and what the chat template writes
around it has mask 0. Each call that ended is on record, so a rollout that is played again calls no finished tool again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import pydantic

from penstock.agent_loop.base import AgentLoop
from penstock.agent_loop.config import AgentLoopConfig
from penstock.agent_loop.parsers import Parsed, Parser, ToolCall, find_parser
from penstock.agent_loop.rendering import TemplateProblem, ids_after, template_problems
from penstock.agent_loop.tools import FunctionTool, Tool, Toolbox, ToolLimits
from penstock.agent_loop.transcript import Answer, Calling, ToolAnswer, Transcript
from penstock.agent_loop.verl_tools import load_function_tools, load_tool_config
from penstock.errors import ConfigError
from penstock.judger.handler import Handler
from penstock.ports import Tokenizer
from penstock.rollout import FinishReason, RolloutState, SampleParams


class ToolAgentLoop(AgentLoop):
    """Ends with an answer without a call, at the turn cap, or when the token budget is used up."""

    def __init__(
        self,
        *,
        tools: Sequence[Handler] = (),
        tool_config_path: str | None = None,
        function_tool_path: str | None = None,
        limits: ToolLimits = ToolLimits(),  # noqa: B008 - frozen
        parser: str | Parser = "hermes",
        max_turns: int = 8,
        max_tokens_per_turn: int | None = None,
        max_parallel_calls: int = 8,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.toolbox = Toolbox(load_tools(tools, tool_config_path, function_tool_path, limits), limits)
        self.parse = find_parser(parser)
        self._max_turns = max_turns
        self._max_tokens_per_turn = max_tokens_per_turn
        self._max_parallel_calls = max_parallel_calls

    async def generate_sample(self, rollout: RolloutState) -> RolloutState:
        transcript = self.transcript(rollout)
        history: list[dict[str, Any]] = [*rollout.messages]
        schemas = rollout.prompt.tools or self.toolbox.schemas
        for turn in range(1, self._max_turns + 1):
            answer = await transcript.generate(self._params(transcript.record.position(0)))
            parsed = self.parse(answer.text)
            if not self._goes_on(answer, parsed, turn):
                break
            history.append(_answer_message(parsed, turn))
            new = _result_messages(parsed, await self._call(transcript, parsed.calls), turn)
            ids = ids_after(self.tokenizer, history, new, schemas, last_id=transcript.record.last_id(0))
            if transcript.record.position(0) + len(ids) >= self.sample_params.max_tokens:
                rollout.finish_reason = FinishReason.LENGTH
                break
            await transcript.append(ids)
            history += new
        return rollout

    async def close(self) -> None:
        await super().close()
        await self.toolbox.close()

    def _params(self, used: int) -> SampleParams:
        """What is left of the budget, and at most that of a turn."""
        left = self.sample_params.max_tokens - used
        return msgspec.structs.replace(self.sample_params, max_tokens=min(left, self._max_tokens_per_turn or left))

    def _goes_on(self, answer: Answer, parsed: Parsed, turn: int) -> bool:
        return bool(parsed.calls) and answer.finish_reason is FinishReason.STOP and turn < self._max_turns

    async def _call(self, transcript: Transcript, calls: Sequence[ToolCall]) -> list[ToolAnswer]:
        def calling(call: ToolCall) -> Calling:
            return Calling(call.name, lambda: self.toolbox.answer(call, transcript.rollout))

        return await transcript.call_tools([calling(call) for call in calls], at_once=self._max_parallel_calls)


def load_tools(
    functions: Sequence[Handler], tool_config_path: str | None, function_tool_path: str | None, limits: ToolLimits
) -> Iterator[Tool]:
    """Raises ConfigError."""
    for function in functions:
        yield FunctionTool(function, limits)
    if tool_config_path is not None:
        yield from load_tool_config(tool_config_path, limits)
    if function_tool_path is not None:
        yield from load_function_tools(function_tool_path, limits)


class ToolAgentLoopConfig(AgentLoopConfig):
    """Several turns with tools. `sample_params.max_tokens` is the budget of the whole conversation after the prompt:
    of all answers, and of all that tools say."""

    loop: type[AgentLoop] | str = ToolAgentLoop
    tools: list[Callable[..., Any] | str] = []
    """Functions, async or plain, or their names: `package.module.name`, `file.py:name`."""
    tool_config_path: str | None = None
    """A YAML file of tools written for verl."""
    function_tool_path: str | None = None
    """A Python file of functions decorated for verl."""
    parser: Callable[[str], Parsed] | str = "hermes"
    """How calls are written: `hermes`, `qwen3_coder`, `llama3_json`, `json`, or a function's dotted path."""
    max_turns: int = pydantic.Field(default=8, ge=1)
    """Answers of the model."""
    max_tokens_per_turn: int | None = pydantic.Field(default=None, ge=1)
    """Of one answer. None: what is left of the rollout's budget."""
    max_parallel_calls: int = pydantic.Field(default=8, ge=1)
    """Calls of one answer that are made at a time."""
    tool_timeout_s: float = pydantic.Field(default=30.0, gt=0, allow_inf_nan=False)
    """Of one call, from when it begins."""
    num_tool_workers: int = pydantic.Field(default=2, ge=1, le=1000)
    """Processes for each tool that is a plain function."""
    max_tool_text: int = pydantic.Field(default=4096, ge=1)
    """Characters of what a tool says; a longer text is cut."""
    cut_tool_text: Literal["start", "middle", "end"] = "middle"
    """Where it is cut."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        try:
            find_parser(self.parser)
        except ConfigError as error:
            yield from (f"parser: {problem}" for problem in error.problems)
        try:
            self._toolbox()
        except ConfigError as error:
            yield from error.problems

    def prompt_tools(self) -> tuple[dict[str, Any], ...]:
        return self._toolbox().schemas

    def template_problems(self, tokenizer: Tokenizer) -> list[TemplateProblem]:
        return template_problems(tokenizer, ("tool",), self.prompt_tools())

    def loop_arguments(self) -> dict[str, Any]:
        return {
            "tools": tuple(self.tools),
            "tool_config_path": self.tool_config_path,
            "function_tool_path": self.function_tool_path,
            "limits": self._limits(),
            "parser": self.parser,
            "max_turns": self.max_turns,
            "max_tokens_per_turn": self.max_tokens_per_turn,
            "max_parallel_calls": self.max_parallel_calls,
            **self.arguments,
        }

    def _limits(self) -> ToolLimits:
        return ToolLimits(
            timeout_s=self.tool_timeout_s,
            num_workers=self.num_tool_workers,
            max_text=self.max_tool_text,
            cut=self.cut_tool_text,
        )

    def _toolbox(self) -> Toolbox:
        limits = self._limits()
        return Toolbox(load_tools(self.tools, self.tool_config_path, self.function_tool_path, limits), limits)


def _call_id(turn: int, number: int) -> str:
    """Nine letters and digits: what the strictest template asks for."""
    return f"call{turn % 1000:03d}{number % 100:02d}"


def _answer_message(parsed: Parsed, turn: int) -> dict[str, Any]:
    calls = [
        {"id": _call_id(turn, n), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for n, call in enumerate(parsed.calls)
    ]
    return {"role": "assistant", "content": parsed.content, "tool_calls": calls}


def _result_messages(parsed: Parsed, results: Sequence[ToolAnswer], turn: int) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": _call_id(turn, n), "name": call.name, "content": said.text}
        for n, (call, said) in enumerate(zip(parsed.calls, results, strict=True))
    ]
