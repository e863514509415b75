"""A thread beside the event loop that notices when the loop does not turn.

Every deadline of a run is kept by its event loop. A synchronous call that blocks for ever, in an agent loop or in a
reward function that runs there, stops them all. So a thread asks the loop for a sign of life; when none comes for
`timeout_s` it writes down where the loop is stuck and ends the process. That is a kill, and the run is resumed as after
one: child processes end with this one, and the ledger has what was acknowledged.

What counts is time in which this thread ran and the loop did not: a process that was stopped and goes on is not
stalled. A call that never gives up the interpreter's lock stops this thread too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

LOOP_STALL_TIMEOUT_S = 300.0


class Heartbeat:
    """`with Heartbeat(loop, file):` in the loop's own thread. Ends the process with status 1 when the loop stalls."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        file: Path,
        *,
        timeout_s: float = LOOP_STALL_TIMEOUT_S,
        interval_s: float = 1.0,
    ) -> None:
        """`file` gets the stacks of a loop that stalled, as stderr does."""
        self._loop = loop
        self._file = file
        self._timeout_s = timeout_s
        self._interval_s = min(interval_s, timeout_s / 4)
        self._answered = threading.Event()
        self._end = threading.Event()
        self._watched = 0
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._watched = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        silent_s = 0.0
        self._answered.set()
        before = time.monotonic()
        while not self._end.wait(self._interval_s):
            now = time.monotonic()
            # A longer wait than asked for is one in which the whole process stood still.
            silent_s += min(now - before, 2 * self._interval_s)
            before = now
            if self._answered.is_set():
                silent_s = 0.0
                self._answered.clear()
                try:
                    self._loop.call_soon_threadsafe(self._answered.set)
                except RuntimeError:  # the loop is closed
                    return
            elif silent_s >= self._timeout_s:
                self._end_process(silent_s)

    def _end_process(self, silent_s: float) -> None:
        said = (
            f"penstock: the event loop did not turn for {silent_s:.0f} s, so no deadline of the run works; something "
            "called from it blocks. The process ends here and the run can be resumed. It is stuck in:\n"
            f"{self._stacks()}"
        )
        with contextlib.suppress(OSError):
            self._file.write_text(said, encoding="utf-8", errors="replace")
        # A reader that does not read must not keep the process alive.
        telling = threading.Thread(target=_tell, args=(said,), name="heartbeat's last words", daemon=True)
        telling.start()
        telling.join(timeout=2.0)
        os._exit(1)

    def _stacks(self) -> str:
        """Of the loop's thread, then of the others."""
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        others = [ident for ident in frames if ident not in (self._watched, threading.get_ident())]
        stacks = ["".join(traceback.format_stack(frames[self._watched]))] if self._watched in frames else []
        stacks += [f"thread {names.get(i, i)!r}:\n{''.join(traceback.format_stack(frames[i]))}" for i in others]
        return "\n".join(stacks)


def _tell(said: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, said.encode(errors="replace"))
