"""Which answer on record a request goes on from. Pure: neither tokens nor I/O.

A history is the model and the tools, both rendered into the prompt, and the messages. A request attaches to the deepest
answer whose full history is the beginning of its own:

    on record      model, tools | system | user 1 | answer 1 | user 2 | answer 2
    a request      model, tools | system | user 1 | answer 1 | user 2b             attaches to answer 1
    another        model, tools | system | summary                                 attaches to none

How strictly messages must be equal is a choice:

    exact             as they were sent
    json-arguments    the arguments of tool calls equal as JSON: clients write them again
    role-and-content  role and content; what was called is not looked at
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Strictness = Literal["exact", "json-arguments", "role-and-content"]

Message = Mapping[str, Any]
"""In the shape of OpenAI's chat messages; arguments of calls as text."""


Key = tuple[str, ...]
"""What is compared of a message, text by text. Not a digest: that would read all of a long conversation at every turn,
several times slower than Python compares it."""


class Recorded(msgspec.Struct, kw_only=True):
    """An answer: where its tokens are, and whether anybody has it."""

    segment: int
    begin: int
    """Its first token in the segment."""
    end: int
    resume_at: int | None
    """How many tokens of the segment stand before what follows the answer; None when nothing can follow it, because it
    was cut."""
    text: str = ""
    received: bool = False
    """It was delivered, or a later request contains it. What nobody received is not trained."""


class History(msgspec.Struct, frozen=True, gc=False):
    """A request's, as it is compared: a key for the model and its tools, and one for each message."""

    opening: Key
    messages: tuple[Key, ...]


class _Spot:
    """What is on record after a history."""

    __slots__ = ("answers", "next")

    def __init__(self) -> None:
        self.answers: list[Recorded] = []
        self.next: dict[Key, _Spot] = {}


class Tree:
    def __init__(self, strictness: Strictness = "json-arguments") -> None:
        self._strictness: Strictness = strictness
        self._openings: dict[Key, _Spot] = {}
        self._texts: dict[str, dict[str, list[Recorded]]] = {}
        """By model and text."""

    def history(self, model: str, tools: Sequence[Message], messages: Sequence[Message]) -> History:
        return History(self._opening(model, tools), tuple([self._key(message) for message in messages]))

    def add(self, history: History, answer: Message, recorded: Recorded) -> None:
        spot = self._openings.setdefault(history.opening, _Spot())
        for key in (*history.messages, self._key(answer)):
            spot = spot.next.setdefault(key, _Spot())
        spot.answers.append(recorded)

    def attach(self, history: History) -> tuple[Recorded | None, int]:
        """The deepest answer that can be followed, and how many of the messages it and its history are.

        Every answer that the request contains was received, whoever delivered it.
        """
        deepest: tuple[Recorded | None, int] = (None, 0)
        spot = self._openings.get(history.opening)
        for depth, key in enumerate(history.messages, 1):
            spot = spot.next.get(key) if spot is not None else None
            if spot is None:
                break
            if spot.answers:
                found = _received(spot.answers)
                if found.resume_at is not None:
                    deepest = (found, depth)
        return deepest

    def add_text(self, model: str, text: str, recorded: Recorded) -> None:
        """For completions without messages: `text` is the prompt and the answer."""
        self._texts.setdefault(model, {}).setdefault(text, []).append(recorded)

    def attach_text(self, model: str, text: str) -> tuple[Recorded | None, int]:
        """As `attach`, in characters."""
        deepest: tuple[Recorded | None, int] = (None, 0)
        for said, answers in self._texts.get(model, {}).items():
            if len(said) > deepest[1] and text.startswith(said):
                found = _received(answers)
                if found.resume_at is not None:
                    deepest = (found, len(said))
        return deepest

    def _opening(self, model: str, tools: Sequence[Message]) -> Key:
        if self._strictness == "exact":
            return (model, *(json.dumps(tool) for tool in tools))
        return (model, *(json.dumps(_plain(tool), sort_keys=True) for tool in tools))

    def _key(self, message: Message) -> Key:
        if len(message) == 2 or self._strictness == "role-and-content":  # most of a conversation; nothing but these two
            return message["role"], message["content"]
        parts = [message["role"], message["content"], message.get("name", ""), message.get("tool_call_id", "")]
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if self._strictness == "json-arguments":
                arguments = as_json(arguments)
            parts += [call["id"], call["function"]["name"], arguments]
        return tuple(parts)


def as_json(text: str) -> str:
    """The same for texts that are equal as JSON; the text itself where it is none."""
    try:
        return json.dumps(_plain(json.loads(text)), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def _plain(value: Any) -> Any:
    """Numbers that are whole as such: 2.0 comes back from some clients as 2."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _received(answers: list[Recorded]) -> Recorded:
    """Of answers with one history, the one that the client has: the last that was received, else the last."""
    found = next((recorded for recorded in reversed(answers) if recorded.received), answers[-1])
    found.received = True
    return found
