"""A stream that may hang or break, written to by a thread: what shows a run never holds it up and never ends it."""

from __future__ import annotations

import threading
from typing import TextIO

MAX_WAITING = 4096
"""Texts kept for a reader that has stopped."""
DRAIN_TIMEOUT_S = 5.0


class Output:
    """What finds no place because nobody reads is dropped, and so is all that follows an error; `error` says which."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: list[str] = []
        self._writing = False
        self._changed = threading.Condition()
        self.error: Exception | None = None

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with self._changed:
            if self.error is None and len(self._waiting) < MAX_WAITING:
                self._waiting.append(text)
                if not self._writing:
                    self._writing = True
                    threading.Thread(target=self._write_out, name="display", daemon=True).start()
        return len(text)

    def flush(self) -> None:
        """What was written is on its way already."""

    def isatty(self) -> bool:
        return self.error is None and self._stream.isatty()

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Until all is written; not longer than the timeout, for somebody may have stopped reading."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing, timeout_s)

    def _write_out(self) -> None:
        """A thread's life: as long as something waits."""
        while True:
            with self._changed:
                text = "".join(self._waiting)
                self._waiting.clear()
                if not text:
                    self._writing = False
                    self._changed.notify_all()
                    return
            try:
                # A terminal without these letters shows others in their place.
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
                self._stream.flush()
            except (OSError, ValueError) as error:
                with self._changed:
                    self.error = error
                    self._waiting.clear()
