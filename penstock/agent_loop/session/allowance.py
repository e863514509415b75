"""Allowance: how many tokens the answers of one session may have in all, also when several are made at once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from penstock.replay.signal import Signal


class Allowance:
    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._spent = 0
        self._promised = 0
        """To answers that are being made, which may write as many."""
        self._changed = Signal()

    @property
    def left(self) -> int | None:
        """Of what is not spent; None without a limit."""
        return None if self._limit is None else self._limit - self._spent

    def spend(self, tokens: int) -> None:
        self._spent += tokens

    @contextlib.asynccontextmanager
    async def part(self, wanted: int) -> AsyncGenerator[int, None]:
        """As many tokens as wanted; fewer, perhaps none, where the session has no more.

        Waits while other answers may still write what is missing: they seldom write all that they may, and who refuses
        at once would cut off sub-agents that ask together.
        """
        if self._limit is None:
            yield wanted
            return
        limit = self._limit
        await self._changed.wait_until(
            lambda: not self._promised or self._spent + self._promised + wanted <= limit or self._spent >= limit
        )
        granted = max(0, min(wanted, limit - self._spent - self._promised))
        self._promised += granted
        try:
            yield granted
        finally:
            self._promised -= granted
            self._changed.notify()
