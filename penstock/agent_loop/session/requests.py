"""What a client asks for, whatever wire it came over, and how it is told that it cannot have it."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.agent_loop.session.tree import Message

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
"""What a client may say about the distribution. In a training session the run's own holds."""


class Refused(Exception):
    """A request that is not served: the status, a stable word for programs, and the message for people."""

    def __init__(
        self, status: int, message: str, *, code: str = "invalid_request", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or {}


def bad_request(message: str) -> Refused:
    return Refused(400, message)


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one answer: to a conversation, or to a text."""

    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Of a completion without messages."""
    tools: tuple[dict[str, Any], ...] = ()
    reads_calls: bool = False
    """Calls of tools are looked for in the answer."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: dict[str, float] = {}
    stream: bool = False
    stream_usage: bool = False
    unheeded: tuple[str, ...] = ()
    """Fields that ask for what cannot be promised, such as an answer of a given form."""


class Call(msgspec.Struct, frozen=True):
    """A call of a tool in an answer."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""

    def as_message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is whole and on record."""

    id: str
    content: str
    calls: tuple[Call, ...] = ()
    cut: bool = False
    """By its length."""
    stop: str | None = None
    """The stop that ended it, if the client named one that did."""
    prompt_tokens: int
    completion_tokens: int

    def as_message(self) -> Message:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        return message | {"tool_calls": [call.as_message() for call in self.calls]} if self.calls else message


def read_json(body: bytes, form: type[Any]) -> Any:
    """The body as a struct. Raises Refused for what is no JSON, or another form of it."""
    try:
        return msgspec.json.decode(body, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the request body cannot be read: {error}") from None
