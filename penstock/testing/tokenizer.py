"""A tokenizer for tests: one token a character."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

END = 0
"""Ends an answer."""
TURN = 1
"""Begins a message."""


class CharTokenizer:
    """Its chat template writes a message as TURN and its text, an assistant's with its calls as JSON lines and END."""

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({END})

    @property
    def vocab_size(self) -> int:
        return 0x110000

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i > TURN)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.encode(self.render_text(messages, tools))

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = True,
    ) -> str:
        return "".join(_written(message) for message in messages)


def _written(message: Mapping[str, Any]) -> str:
    text = f"{chr(TURN)}{message['content']}"
    if message.get("role") != "assistant":
        return text
    return "\n".join([text, *(json.dumps(call["function"]) for call in message.get("tool_calls") or ())]) + chr(END)
