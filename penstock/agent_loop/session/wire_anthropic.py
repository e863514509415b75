"""Anthropic's wire: `/v1/messages`, whole or streamed. Pure: bytes in, bytes out.

Blocks become messages in the shape that templates know: a `tool_use` is a call of the assistant's message, a
`tool_result` a message of its own, before the text that stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from penstock.agent_loop.session.requests import SAMPLING, Asking, Finished, Refused, bad_request, read_json
from penstock.agent_loop.session.tree import Message

Blocks = str | list["_Block"]


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: Blocks | None = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class _Body(msgspec.Struct, kw_only=True):
    model: str
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=10**9)] | None = None
    system: Blocks | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: dict[str, Any] | None = None


class MessagesWire:
    def read(self, body: bytes) -> Asking:
        asked: _Body = read_json(body, _Body)
        if asked.max_tokens is None:
            raise bad_request("max_tokens: Field required")
        return _asking(asked)

    def read_count(self, body: bytes) -> Asking:
        """Of `/v1/messages/count_tokens`, which asks for no answer."""
        return _asking(read_json(body, _Body))

    def whole(self, asking: Asking, answer: Finished) -> bytes:
        content: list[dict[str, Any]] = [{"type": "text", "text": answer.content}] if answer.content else []
        content += [_tool_use(call.id, call.name, _input(call.arguments)) for call in answer.calls]
        return msgspec.json.encode(
            _envelope(asking, answer.id)
            | {
                "content": content,
                "stop_reason": _stop_reason(answer),
                "stop_sequence": answer.stop,
                "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
            }
        )

    def opening(self, asking: Asking, answer_id: str, prompt_tokens: int) -> Iterator[bytes]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = _envelope(asking, answer_id) | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", {"message": message | {"usage": usage}})
        yield _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})

    def piece(self, asking: Asking, answer_id: str, text: str) -> bytes:
        return _event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}})

    def closing(self, asking: Asking, answer: Finished) -> Iterator[bytes]:
        yield _event("content_block_stop", {"index": 0})
        for index, call in enumerate(answer.calls, 1):
            yield _event("content_block_start", {"index": index, "content_block": _tool_use(call.id, call.name, {})})
            delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(_input(call.arguments)).decode()}
            yield _event("content_block_delta", {"index": index, "delta": delta})
            yield _event("content_block_stop", {"index": index})
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}
        ending = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop}
        yield _event("message_delta", {"delta": ending, "usage": usage})
        yield _event("message_stop", {})

    def error(self, refused: Refused) -> bytes:
        return anthropic_error(refused)

    def broken(self, refused: Refused) -> bytes:
        return b"event: error\ndata: " + anthropic_error(refused) + b"\n\n"


def anthropic_error(refused: Refused) -> bytes:
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}.get(
        refused.status
    )
    kind = kind or ("invalid_request_error" if refused.status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": refused.message}})


def token_count(n: int) -> bytes:
    return msgspec.json.encode({"input_tokens": n})


def _asking(asked: _Body) -> Asking:
    messages: list[Message] = []
    if asked.system:
        messages.append({"role": "system", "content": _text(asked.system)})
    for message in asked.messages:
        messages += _messages(message)
    if asked.messages[-1].role == "assistant":
        raise bad_request("the last message is the assistant's; going on with a given beginning is not served")
    choice = (asked.tool_choice or {}).get("type", "auto")
    unheeded = ["tool_choice"] if asked.tools and choice not in ("auto", "none") else []
    if asked.thinking and asked.thinking.get("type") != "disabled":
        unheeded.append("thinking")
    tools = tuple(_tool(tool) for tool in asked.tools or ())
    return Asking(
        model=asked.model,
        messages=tuple(messages),
        tools=tools,
        reads_calls=bool(tools) and choice != "none",
        max_tokens=asked.max_tokens,
        stop=tuple(asked.stop_sequences or ()),
        sampling={name: value for name in SAMPLING if (value := getattr(asked, name, None)) is not None},
        stream=bool(asked.stream),
        unheeded=tuple(unheeded),
    )


def _messages(message: _Message) -> list[Message]:
    blocks = [_Block("text", message.content)] if isinstance(message.content, str) else message.content
    results: list[Message] = []
    calls = []
    texts = []
    for block in blocks:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use" and message.role == "assistant":
            arguments = msgspec.json.encode(block.input).decode()
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
        elif block.type == "tool_result" and message.role == "user":
            results.append({"role": "tool", "content": _text(block.content or ""), "tool_call_id": block.tool_use_id})
        elif block.type not in ("thinking", "redacted_thinking"):
            raise bad_request(f"a {message.role} message has a block of type {block.type!r}, which is not served")
    if results and not texts:
        return results
    said: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    return [*results, said | {"tool_calls": calls} if calls else said]


def _text(content: Blocks) -> str:
    if isinstance(content, str):
        return content
    other = [block.type for block in content if block.type != "text"]
    if other:
        raise bad_request(f"a block of type {other[0]!r} stands where only text is served")
    return "\n".join(block.text for block in content)


def _tool(tool: _Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise bad_request(f"tool {tool.name!r} of type {tool.type!r} is not served; only the client's own tools are")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _tool_use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _input(arguments: str) -> dict[str, Any]:
    found: Any = msgspec.json.decode(arguments)
    return found if isinstance(found, dict) else {"value": found}


def _stop_reason(answer: Finished) -> str:
    if answer.cut:
        return "max_tokens"
    if answer.calls:
        return "tool_use"
    return "stop_sequence" if answer.stop is not None else "end_turn"


def _envelope(asking: Asking, answer_id: str) -> dict[str, Any]:
    return {"id": answer_id, "type": "message", "role": "assistant", "model": asking.model}


def _event(kind: str, body: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **body}) + b"\n\n"
