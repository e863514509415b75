"""How a call of a judge ends when it ends without a verdict."""

from __future__ import annotations

from penstock.rollout import Unjudged


class CallFailed(Exception):
    """A call ended without a verdict. `cause` is for metrics: timeout, worker_death, memory, start, busy, closed,
    service, abstention.

    `way` is equal for failures of one bug, empty where nothing is known; `plain_bug` says that the answer is not the
    cause; `detail` is a traceback; `may_pass` is False where the same call would fail in the same way.
    """

    def __init__(
        self,
        cause: str,
        reason: str,
        *,
        way: str = "",
        detail: str = "",
        plain_bug: bool = False,
        may_pass: bool = True,
    ) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason
        self.way = way
        self.detail = detail
        self.plain_bug = plain_bug
        self.may_pass = may_pass

    def as_unjudged(self, prefix: str = "") -> Unjudged:
        return Unjudged(prefix + self.reason, self.detail)
