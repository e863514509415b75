"""How a person ends a run: the first signal asks for an orderly end, the second stops it now. Both can be resumed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator

from penstock.events import Note, Observer

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether the run is to end in order."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self) -> bool:
        return self.requested


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

    def ended(name: str) -> None:
        if stop.requested:
            observer.notice(Note(text=f"{name}: stopping now; the run can be resumed."))
            main.cancel()
            return
        stop.requested = True
        observer.notice(Note(text=f"{name}: finishing the step and writing a checkpoint. Once more to stop now."))

    handled = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, ended, number.name)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
