"""What is written beside training, one piece of work after the other.

    begin(a) ... begin(b) ... wait     b is begun when a has ended; who would hold a second snapshot waits first
              \\__ check: raises why a failed, before the next train step

What has failed is not forgotten: everything that is asked afterwards raises it, and nothing more is begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from penstock.events import Note, Observer

Work = Callable[[], Awaitable[None]]


class CheckpointWriter:
    """`async with writer:` around a run. At its end everything is written, also that of a run which failed elsewhere.

    Cancelled, it ends after the file operation that is under way: what is then on the disk is what a kill leaves there.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._last: asyncio.Task[None] | None = None
        """Ends when everything that was begun has."""

    @property
    def is_busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def begin(self, what: str, work: Work) -> None:
        """Do this when what was begun before has ended. Raises what that failed with, if it is known."""
        self.check()
        self._last = asyncio.create_task(_after(self._last, work), name=what)

    def check(self) -> None:
        """Raises what failed since; never waits."""
        if self._last is not None and self._last.done():
            self._last.result()

    async def wait(self, why: str = "") -> None:
        """Until everything that was begun is written; `why` is told when there is something to wait for. Raises what
        failed. Cancelled, so is what is under way."""
        if self._last is None:
            return
        if why and self.is_busy:
            self._observer.notice(Note(text=f"{why} waits until {self._last.get_name()} is written"))
        await self._last

    async def __aenter__(self) -> CheckpointWriter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            await self.wait()
            return
        if not isinstance(error, Exception) and self._last is not None:
            self._last.cancel()
        try:
            await self.wait()
        except asyncio.CancelledError:
            if isinstance(error, Exception):
                raise
        except Exception as failed:
            if failed is not error:
                self._observer.notice(Note(text=f"beside that, {type(failed).__name__}: {failed}"))


async def _after(before: asyncio.Task[None] | None, work: Work) -> None:
    if before is not None:
        await before
    await work()
