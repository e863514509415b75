"""What holds calls back while a judge is down.

    closed      calls pass
    open        after `failures` calls in a row without a verdict: calls wait
    probing     after a back-off one call passes; a verdict closes the breaker, anything else opens it for twice as long

An open breaker does not answer at once, because a pipeline that is answered at once draws the next prompt and so eats
its dataset while the judge is down. It makes calls wait, which is back-pressure: nothing new is drawn, nothing spins.
Only a call that reaches its own bound is told that there is no verdict.

A rest helps a judge that worked before. One that never gave a verdict and always fails in the same way is wrong:
`Debut` stops the run, with its traceback.
"""

from __future__ import annotations

import asyncio
import logging

from penstock.errors import UserFunctionError
from penstock.judger.failure import CallFailed

logger = logging.getLogger(__name__)


class Breaker:
    def __init__(self, failures: int, first_backoff_s: float, longest_backoff_s: float) -> None:
        self._limit = failures
        self._first_backoff_s = first_backoff_s
        self._longest_backoff_s = longest_backoff_s
        self._in_a_row = 0
        self._backoff_s = first_backoff_s
        self._probe_at = 0.0
        self._probing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self.last_reason = ""
        self.times_opened = 0

    @property
    def is_open(self) -> bool:
        return self._in_a_row >= self._limit

    @property
    def in_a_row(self) -> int:
        return self._in_a_row

    async def admit(self, until: float) -> bool:
        """True when the call may go on, at once or after a wait; False when the loop's time reached `until` first.

        Whoever is admitted must say how it ended: `succeed`, `fail` or `leave`.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # another loop has another clock, and the probe of the old one is gone
            self._loop, self._probing, self._probe_at = loop, False, loop.time()
            self._waiting.clear()
        while self.is_open:
            now = loop.time()
            if now >= until:
                return False
            if not self._probing and now >= self._probe_at:
                self._probing = True
                return True
            await self._change((until if self._probing else min(until, self._probe_at)) - now)
        return True

    def succeed(self) -> None:
        self._in_a_row = 0
        self._probing = False
        self._backoff_s = self._first_backoff_s
        self._wake()

    def fail(self, reason: str) -> None:
        self._in_a_row += 1
        self.last_reason = reason
        if not self.is_open:
            return
        if self._in_a_row == self._limit:
            self.times_opened += 1
            logger.warning("%d calls of a judge in a row gave no verdict; it is given a rest. %s", self._limit, reason)
        elif self._probing:
            self._backoff_s = min(2 * self._backoff_s, self._longest_backoff_s)
        else:
            return  # it was under way when the breaker opened
        self._probing = False
        self._probe_at = asyncio.get_running_loop().time() + self._backoff_s
        self._wake()

    def leave(self) -> None:
        """A call was cancelled: it says nothing about the judge, and another may probe."""
        self._probing = False
        self._wake()

    async def _change(self, timeout: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(woken)
        try:
            await asyncio.wait({woken}, timeout=timeout)
        finally:
            self._waiting.discard(woken)

    def _wake(self) -> None:
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)


SAME_PLAIN_BUGS = 8
"""Rollouts after which a judge that raises a TypeError or the like for each of them is believed to be wrong."""


class Debut:
    """Until a judge has given its first verdict: whether it fails for all rollouts, in ways that are known."""

    def __init__(self, name: str, failures: int) -> None:
        self._name = name
        self._limit = failures
        self._worked = False
        self._way = ""
        self._in_a_row = 0
        self._in_known_ways = 0

    def succeed(self) -> None:
        self._worked = True

    def fail(self, failure: CallFailed) -> None:
        """Count a rollout without a verdict. Raises UserFunctionError when the judge cannot work."""
        if self._worked:
            return
        self._in_a_row = self._in_a_row + 1 if failure.way and failure.way == self._way else 1
        self._in_known_ways = self._in_known_ways + 1 if failure.way else 0
        self._way = failure.way
        limit = min(SAME_PLAIN_BUGS, self._limit) if failure.plain_bug else self._limit
        if failure.way and (self._in_a_row >= limit or self._in_known_ways >= self._limit):
            number, how = self._in_known_ways, f"the last time in this one ({failure.way})"
            if self._in_a_row >= limit:
                number, how = self._in_a_row, f"each time the same ({failure.way})"
            raise UserFunctionError(
                f"the judge {self._name} gave no verdict for any of the first {number} rollouts, {how}: "
                f"{failure.reason}\n{failure.detail}".rstrip()
                + "\nMend it, or return a score for such answers, and start again."
            )
