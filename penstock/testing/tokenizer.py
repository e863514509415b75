"""A tokenizer for tests: one token a character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

END = 0
"""Ends an answer."""
TURN = 1
"""Begins a message."""


class CharTokenizer:
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
        return [i for message in messages for i in (TURN, *self.encode(str(message["content"])))]
