"""Where the generated tokens went: generated = trained + held + wasted, by reason.

`held` are the tokens of groups that may still be trained. The equation holds after every event.
"""

from __future__ import annotations

from collections import Counter

import msgspec


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
