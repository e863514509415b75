"""Who is told what happens in a run: the display, the trackers, the profile, the summary, and `events.jsonl`.

    Observers    passes every event on to all sinks; one that raises is dropped, which is said once
    EventFile    events.jsonl: one event per line, with the wall clock's time and the seconds since the run began
    read_events  and back

What shows a run never ends it. Events from before a sink was added are told to it when it comes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.events import AnyEvent, EngineSeen, Event, Observer, TaskProgress, Warned
from penstock.rollout import storable

EVENTS_FILE = "events.jsonl"
MAX_EARLY = 1000
"""Events kept for sinks that come later; a run has a few dozen before its directory is open."""
SEEN_EVERY_S = 10.0
"""How an engine does is kept so often."""
_TAIL = 1 << 16


class Sink(Protocol):
    def notice(self, event: Event) -> None:
        """May raise; then it is not told anything more."""
        ...

    def close(self) -> None: ...


class Observers:
    """An `Observer` for many. Events come from any thread; sinks are told one at a time."""

    def __init__(self, **sinks: Sink) -> None:
        self._sinks: dict[str, Sink] = dict(sinks)
        self._early: list[Event] = []
        self._lock = threading.RLock()

    def add(self, name: str, sink: Sink) -> None:
        """From now on it is told everything, and first what it missed."""
        with self._lock:
            self._sinks[name] = sink
            for event in list(self._early):
                self._tell(name, sink, event)

    def notice(self, event: Event) -> None:
        with self._lock:
            if len(self._early) < MAX_EARLY and not isinstance(event, TaskProgress | EngineSeen):
                self._early.append(event)
            for name, sink in list(self._sinks.items()):
                self._tell(name, sink, event)

    def close(self) -> None:
        """All sinks, whatever one of them raises. One may take minutes; meanwhile the others are told what happens."""
        while True:
            with self._lock:
                if not self._sinks:
                    return
                name = next(iter(self._sinks))
                sink = self._sinks.pop(name)
            try:
                sink.close()
            except Exception as error:
                self._say_dropped(name, error)

    def _tell(self, name: str, sink: Sink, event: Event) -> None:
        if self._sinks.get(name) is not sink:
            return
        try:
            sink.notice(event)
        except Exception as error:
            self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._sinks.pop(name).close()
        self._say_dropped(name, error)

    def _say_dropped(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.notice(Warned(text=f"{name} failed and is told nothing more; the run goes on. {reason}", source=name))

    @contextlib.contextmanager
    def warnings(self) -> Iterator[None]:
        """What parts of Penstock log and what Python warns of is told here, until the end of the block."""
        handler, logger, show = _ToObserver(self), logging.getLogger("penstock"), warnings.showwarning

        def told(message: Warning | str, category: type[Warning], *place: Any, **rest: Any) -> None:
            self.notice(Warned(text=str(message), source=category.__name__))

        logger.addHandler(handler)
        warnings.showwarning = told
        try:
            yield
        finally:
            warnings.showwarning = show
            logger.removeHandler(handler)


class _ToObserver(logging.Handler):
    def __init__(self, observer: Observer) -> None:
        super().__init__(logging.WARNING)
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        self._observer.notice(Warned(text=record.getMessage(), source=record.name))


class KeptEvent(msgspec.Struct, frozen=True):
    """One line of `events.jsonl`."""

    time: float
    """The wall clock's, in seconds since 1970."""
    at: float
    """Seconds since the run began, over all its processes; never goes back, whatever the wall clock does."""
    event: Event


class EventFile:
    """Appends. A line that a kill tore is ended first, so that what follows can be read."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        before, torn = _last_line(path)
        self._began = time.monotonic() - before
        self._separator = b"\n" if torn else b""
        self._seen: dict[str, float] = {}
        """When the load of an engine was last kept."""
        # Unbuffered: a line is with the system when it was told.
        self._file = path.open("ab", buffering=0)

    def notice(self, event: Event) -> None:
        if isinstance(event, TaskProgress) or (isinstance(event, EngineSeen) and not self._is_due(event)):
            return
        line = {
            "time": round(time.time(), 3),
            "at": round(time.monotonic() - self._began, 3),
            **msgspec.to_builtins(event),
        }
        try:
            encoded = msgspec.json.encode(line)
        except UnicodeEncodeError:
            encoded = msgspec.json.encode({key: storable(v) if isinstance(v, str) else v for key, v in line.items()})
        self._file.write(self._separator + encoded + b"\n")
        self._separator = b""

    def _is_due(self, event: EngineSeen) -> bool:
        now = time.monotonic()
        if now - self._seen.get(event.engine, -SEEN_EVERY_S) < SEEN_EVERY_S:
            return False
        self._seen[event.engine] = now
        return True

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[KeptEvent]:
    """The events of a run, in order. Lines that a kill tore are left out."""
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(msgspec.DecodeError):
                stamp = msgspec.json.decode(line, type=_Stamp)
                # Not strict: the keys of a histogram are numbers, and JSON has texts only.
                yield KeptEvent(stamp.time, stamp.at, msgspec.json.decode(line, type=AnyEvent, strict=False))


class _Stamp(msgspec.Struct):
    time: float
    at: float


def _last_line(path: Path) -> tuple[float, bool]:
    """When the last whole line was written, and whether a torn one follows it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            tail = file.read(_TAIL)
    except FileNotFoundError:
        return 0.0, False
    for line in reversed(tail.splitlines()):
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=_Stamp).at, not tail.endswith(b"\n")
    return 0.0, bool(tail) and not tail.endswith(b"\n")
