"""Where the generated tokens went: generated = trained + held + wasted, by reason.

`held` are the tokens of groups that may still be trained. The equation holds after every event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from penstock.replay.shelf import Entry
from penstock.rollout import Group, count_tokens


class TokenAccount(msgspec.Struct):
    generated: int = 0
    trained: int = 0
    held: int = 0
    wasted: Counter[str] = msgspec.field(default_factory=Counter)
    """By discard reason, or `aborted` (interrupted, started again), `re_rolled` (expired, made again), `retried`
    (failed, made again)."""

    def check(self) -> None:
        if self.generated != self.trained + self.held + sum(self.wasted.values()):
            raise AssertionError(f"tokens lost or invented: {self}")

    def count(self, entry: Entry, group: Group) -> None:
        """Take notice of what was generated for a group since it was last counted."""
        now = count_tokens(group)
        new = now - entry.tokens
        self.generated += new
        self.held += new
        entry.tokens = now

    def drop(self, entry: Entry, why: str, tokens: int) -> None:
        """A group that lives on dropped these."""
        if tokens:
            entry.waste(why, tokens)
            self.held -= tokens
            self.wasted[why] += tokens

    def train(self, entry: Entry) -> None:
        self.trained += entry.tokens
        self.held -= entry.tokens

    def discard(self, entry: Entry, reason: str) -> None:
        self.wasted[reason] += entry.tokens
        self.held -= entry.tokens

    def restore(self, *, trained: int, held: int, wasted: Mapping[str, int]) -> None:
        self.trained, self.held, self.wasted = trained, held, Counter(wasted)
        self.generated = trained + held + sum(wasted.values())
