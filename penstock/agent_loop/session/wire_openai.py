"""OpenAI's wire: `/v1/chat/completions` and `/v1/completions`, whole or streamed. Pure: bytes in, bytes out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from penstock.agent_loop.session.requests import SAMPLING, Asking, Finished, Refused, bad_request, read_json
from penstock.agent_loop.session.tree import Message

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Text = str | list["_Part"] | None

UNHEEDED = ("response_format", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""What asks for another distribution or a form of answer; an answer of the model's own is given."""


# Every turn brings all of its conversation: nothing of it is worth looking through for garbage.
class _Part(msgspec.Struct, gc=False):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _Call(msgspec.Struct, gc=False):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"


class _Message(msgspec.Struct, gc=False):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _ToolFunction
    type: Literal["function"] = "function"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    model: str
    max_tokens: PositiveInt | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


class _ChatBody(_Common, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    functions: Any = None
    modalities: list[str] | None = None


class _CompletionBody(_Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


class ChatWire:
    """A conversation in, a message out."""

    def read(self, body: bytes) -> Asking:
        asked: _ChatBody = read_json(body, _ChatBody)
        _refuse_common(asked)
        if asked.functions:
            raise bad_request("`functions` is not served; send `tools`")
        if asked.logprobs:
            raise bad_request("logprobs are not served; they are recorded for training")
        if asked.modalities not in (None, [], ["text"]):
            raise bad_request(f"modalities is {asked.modalities}; only text is served")
        tools = tuple(_tool(tool) for tool in asked.tools or ())
        choice = asked.tool_choice
        unheeded = ("tool_choice",) if tools and choice not in (None, "auto", "none") else ()
        return Asking(
            messages=tuple([_message(message) for message in asked.messages]),
            tools=tools,
            reads_calls=bool(tools) and choice != "none",
            **_common(asked, unheeded),
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
        )

    def whole(self, asking: Asking, answer: Finished) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content or None, "refusal": None}
        if answer.calls:
            message["tool_calls"] = [call.as_message() for call in answer.calls]
        else:
            message["content"] = answer.content
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(answer)}
        return msgspec.json.encode(
            _envelope("chat.completion", asking, answer.id) | {"choices": [choice], "usage": _usage(answer)}
        )

    def opening(self, asking: Asking, answer_id: str, prompt_tokens: int) -> Iterator[bytes]:
        yield self._chunk(asking, answer_id, {"role": "assistant", "content": ""})

    def piece(self, asking: Asking, answer_id: str, text: str) -> bytes:
        return self._chunk(asking, answer_id, {"content": text})

    def closing(self, asking: Asking, answer: Finished) -> Iterator[bytes]:
        """After all pieces: the calls, why it ended, and what it cost."""
        for index, call in enumerate(answer.calls):
            yield self._chunk(asking, answer.id, {"tool_calls": [{"index": index, **call.as_message()}]})
        yield self._chunk(asking, answer.id, {}, finish_reason=_finish_reason(answer))
        if asking.stream_usage:
            body = _envelope("chat.completion.chunk", asking, answer.id) | {"choices": [], "usage": _usage(answer)}
            yield _event(body)
        yield b"data: [DONE]\n\n"

    def error(self, refused: Refused) -> bytes:
        return openai_error(refused)

    def broken(self, refused: Refused) -> bytes:
        """In the middle of a stream."""
        return b"data: " + openai_error(refused) + b"\n\n"

    def _chunk(
        self, asking: Asking, answer_id: str, delta: dict[str, Any], *, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event(_envelope("chat.completion.chunk", asking, answer_id) | {"choices": [choice]})


class CompletionWire:
    """A text in, the text that goes on from it out."""

    def read(self, body: bytes) -> Asking:
        asked: _CompletionBody = read_json(body, _CompletionBody)
        _refuse_common(asked)
        for name in ("echo", "suffix", "logprobs"):
            if getattr(asked, name):
                raise bad_request(f"{name} is not served")
        if asked.best_of not in (None, 1):
            raise bad_request(f"best_of is {asked.best_of}; one answer is made per request")
        return Asking(
            prompt=_one_prompt(asked.prompt),
            **_common(asked, ()),
            max_tokens=asked.max_tokens,
        )

    def whole(self, asking: Asking, answer: Finished) -> bytes:
        choice = self._choice(answer.content, _finish_reason(answer))
        return msgspec.json.encode(
            _envelope("text_completion", asking, answer.id) | {"choices": [choice], "usage": _usage(answer)}
        )

    def opening(self, asking: Asking, answer_id: str, prompt_tokens: int) -> Iterator[bytes]:
        yield from ()

    def piece(self, asking: Asking, answer_id: str, text: str) -> bytes:
        return _event(_envelope("text_completion", asking, answer_id) | {"choices": [self._choice(text, None)]})

    def closing(self, asking: Asking, answer: Finished) -> Iterator[bytes]:
        body = _envelope("text_completion", asking, answer.id)
        yield _event(body | {"choices": [self._choice("", _finish_reason(answer))]})
        if asking.stream_usage:
            yield _event(body | {"choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def error(self, refused: Refused) -> bytes:
        return openai_error(refused)

    def broken(self, refused: Refused) -> bytes:
        return b"data: " + openai_error(refused) + b"\n\n"

    def _choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _one_prompt(prompt: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    """Text, or ids; there may be a list of one of them around it."""
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        if len(prompt) > 1:
            raise bad_request(f"there are {len(prompt)} prompts; one answer is made per request")
        (first,) = prompt
        assert not isinstance(first, int)
        prompt = first  # type: ignore[assignment]
    if not prompt:
        raise bad_request("prompt is empty; it needs at least one token")
    if isinstance(prompt, str):
        return prompt
    ids = tuple(token for token in prompt if isinstance(token, int))
    if min(ids) < 0 or max(ids) >= 1 << 31:
        raise bad_request(f"prompt has ids from {min(ids)} to {max(ids)}; there are none below 0 and above 2^31")
    return ids


def openai_error(refused: Refused) -> bytes:
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(refused.status)
    kind = kind or ("invalid_request_error" if refused.status < 500 else "server_error")
    return msgspec.json.encode(
        {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}}
    )


def models(names: tuple[str, ...]) -> bytes:
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": 0, "owned_by": "penstock"} for name in names],
        }
    )


def _refuse_common(asked: _Common) -> None:
    if asked.n not in (None, 1):
        raise bad_request(f"n is {asked.n}; one answer is made per request: send the request again for another")


def _common(asked: _Common, unheeded: tuple[str, ...]) -> dict[str, Any]:
    stop = asked.stop
    named = tuple(name for name in UNHEEDED if getattr(asked, name) not in (None, 0, {}, {"type": "text"}))
    return {
        "model": asked.model,
        "stop": () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        "sampling": {name: getattr(asked, name) for name in SAMPLING if getattr(asked, name) is not None},
        "stream": bool(asked.stream),
        "stream_usage": bool(asked.stream_options and asked.stream_options.include_usage),
        "unheeded": (*unheeded, *named),
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """As it was sent: the template shows all of it."""
    try:
        msgspec.convert(tool, _Tool)
    except msgspec.ValidationError as error:
        raise bad_request(f"a tool cannot be read: {error}") from None
    return tool


def _message(message: _Message) -> Message:
    """With those fields only that a template writes or that tell messages apart."""
    read: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content if isinstance(message.content, str) else _text(message.content),
    }
    if message.tool_calls:
        if message.role != "assistant":
            raise bad_request(f"a {message.role} message has tool_calls; only an assistant's may")
        read["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.role == "tool" and message.tool_call_id:
        read["tool_call_id"] = message.tool_call_id
    if message.name:
        read["name"] = message.name
    return read


def _call(call: _Call) -> dict[str, Any]:
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _text(parts: list[_Part] | None) -> str:
    """On lines of their own."""
    texts = []
    for part in parts or ():
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            raise bad_request(f"a message has a part of type {part.type!r}; only text is served")
        texts.append(text)
    return "\n".join(texts)


def _finish_reason(answer: Finished) -> str:
    return "length" if answer.cut else "tool_calls" if answer.calls else "stop"


def _usage(answer: Finished) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _envelope(kind: str, asking: Asking, answer_id: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": asking.model}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
