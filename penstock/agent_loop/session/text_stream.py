"""Text of an answer as its tokens are made: what can be shown now, and will not change.

Held back are a character whose bytes are not all there, what may become a stop string, and a call of a tool from the
words on that begin it.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ports import Tokenizer

_INCOMPLETE = "\ufffd"


class TextStream:
    def __init__(self, tokenizer: Tokenizer, *, stops: Sequence[str] = (), calls: Sequence[str] | None = None) -> None:
        """`calls` are the words that begin a call; empty when that cannot be said, and None when none is looked for."""
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._calls = [word for word in calls or () if word]
        self._trims = calls is not None
        self._silent = calls is not None and not self._calls
        """A call may begin anywhere: nothing is shown before the end."""
        self._ids: list[int] = []
        self._shown = 0
        """Tokens whose text was given out or is held."""
        self._before = 0
        """Tokens that are decoded again beside the next, because some tokenizers write a token by what precedes it."""
        self._held = ""
        self.text = ""
        """What was given out so far."""

    def add(self, ids: Sequence[int]) -> str:
        """What may be shown now."""
        self._ids += ids
        if self._silent:
            return ""
        known = self._tokenizer.decode(self._ids[self._before : self._shown])
        text = self._tokenizer.decode(self._ids[self._before :])
        if text.endswith(_INCOMPLETE):
            return ""
        self._before, self._shown = self._shown, len(self._ids)
        self._held += text[len(known) :]
        if self._trims and not self.text:
            self._held = self._held.lstrip()
        given = self._held[: self._safe(self._held)]
        self._held = self._held[len(given) :]
        self.text += given
        return given

    def _safe(self, text: str) -> int:
        """How many characters of what is held are sure."""
        for words in (self._stops, self._calls):
            found = [place for place in (text.find(word) for word in words) if place >= 0]
            if found:
                self._silent = True
                text = text[: min(found)]
        if not self._silent:
            words = [*self._stops, *self._calls]
            text = text[: len(text) - max((_overlap(text, word) for word in words), default=0)]
        return len(text.rstrip() if self._trims else text)


def _overlap(text: str, word: str) -> int:
    """How many of the last characters may be the beginning of the word."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
