"""What `train` and `eval` do before the run itself."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.trainer.observers import Observers


def use_model_cache() -> None:
    home = os.environ.get("PENSTOCK_HOME")
    if home:
        from penstock.models import set_cache_directory

        set_cache_directory(Path(home).expanduser() / "models")


def make_observers() -> Observers:
    from penstock.trainer.display import make_display
    from penstock.trainer.observers import Observers

    # There is no output at all when the process was started without one.
    return Observers(display=make_display(sys.stdout is not None and sys.stdout.isatty()))


class Ending:
    """What is said when a signal ends the command."""

    said = "while loading; nothing was trained"


@contextlib.contextmanager
def loading(name: str, observers: Observers) -> Iterator[Ending]:
    """What goes on is said, and a signal ends it with a word."""
    # Bars of other libraries would tear the picture; the display says what goes on.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from penstock.events import Note, StageBegan
    from penstock.models import KNOWN_MODELS, find_cached

    if name in KNOWN_MODELS and find_cached(name) is None:
        observers.notice(Note(text=f"making the model {name} ready, this once: {KNOWN_MODELS[name]}"))
    observers.notice(StageBegan(stage="load", detail=f"{name}, libraries first"))

    def stopped(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.signal(number, stopped) for number in numbers}
    ending = Ending()
    try:
        yield ending
    except KeyboardInterrupt as interrupt:
        print(f"penstock: {str(interrupt) or 'interrupted'} {ending.said}", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
