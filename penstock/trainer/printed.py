"""`judges.log` in a run directory: what reward functions print. It would tear the picture of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.events import EvaluationDone, Event, Note, Observer, RunEnded, StepTrained

PRINTED_FILE = "judges.log"
_SHOWN = 2000


class Printed:
    """A sink that says once where it is, as soon as there is something."""

    def __init__(self, directory: Path, observer: Observer) -> None:
        self._path = directory / PRINTED_FILE
        self._observer = observer
        self._said = False

    def notice(self, event: Event) -> None:
        if isinstance(event, StepTrained | EvaluationDone | RunEnded):
            self.look()

    def look(self) -> None:
        if not self._said and self._path.exists() and self._path.stat().st_size:
            self._said = True
            self._observer.notice(Note(text=f"the judges print; what they print is in {self._path}"))

    def close(self) -> None:
        pass


def last_printed(path: Path) -> Iterator[str]:
    """The end of what was printed into a file, for a message."""
    try:
        printed = path.read_bytes().decode(errors="replace").strip()
    except OSError:
        return
    if printed:
        yield f"it printed: {printed[-_SHOWN:]}"
