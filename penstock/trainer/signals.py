"""How a person ends a run: the first signal asks for an orderly end, the second stops it now. Both can be resumed.

Code that swallows its cancellation, or blocks the event loop, does not keep a process alive that was told twice to end:
after `END_WITHIN_S` it is ended, as by a kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

from penstock.events import Note, Observer

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_WITHIN_S = 25.0
STOPPED_NOW = 130
"""The exit status of a run that was stopped at once."""


class Stop:
    """Whether the run is to end in order."""

    def __init__(self) -> None:
        self.requested = False
        self._waiting: set[asyncio.Future[None]] = set()

    def __call__(self) -> bool:
        return self.requested

    def request(self) -> None:
        """In the event loop of the run."""
        self.requested = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def cuts_off(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether the run is to end before `work` did: then that is cancelled. Returns when it has ended, either way.

        What it raises passes.
        """
        if self.requested:
            work.close()
            return True
        working = asyncio.create_task(work, name="until the run is to end")
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return False
            return True
        finally:
            self._waiting.remove(waiting)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


@contextlib.contextmanager
def stopped_by_signals(stop: Stop, observer: Observer) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP set `stop`, and the second one cancels the current task.

    A signal that is ignored stays so: that is what `nohup` is for. Outside the main thread nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def ended(name: str, again: bool) -> None:
        if again:
            observer.notice(Note(text=f"{name}: stopping now; the run can be resumed."))
            main.cancel()
            return
        stop.request()
        observer.notice(Note(text=f"{name}: finishing the step and writing a checkpoint. Once more to stop now."))

    told = 0
    # A thread that nothing in the event loop can hold up.
    end = threading.Timer(END_WITHIN_S, os._exit, (STOPPED_NOW,))
    end.daemon = True

    def handle(number: int, frame: object) -> None:
        # Between two bytecodes of whatever runs: the second signal is heard also while the event loop is blocked.
        nonlocal told
        told += 1
        # Here and not in the loop: it may be in its last turn.
        stop.requested = True
        if told == 2:
            end.start()
        loop.call_soon_threadsafe(ended, signal.Signals(number).name, told > 1)

    before = {number: signal.getsignal(number) for number in ENDING}
    handled = [number for number in ENDING if before[number] is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    finally:
        end.cancel()
        for number in handled:
            signal.signal(number, before[number])
