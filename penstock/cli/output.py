"""What a command says when nobody may be there to read it."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def say(text: str) -> None:
    """What a run leaves to say; it was done, whether anybody can read this or not."""
    try:
        print(text, flush=True)
    except (OSError, ValueError):
        close_output()


def replace_missing_letters() -> None:
    """A terminal without the letters of an answer shows others in their place; no command ends because of that."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def open_missing_descriptors() -> None:
    """0 to 2, of a process that was started without them: else the next files it opens are these, and a child process
    would print into one of them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def close_output() -> None:
    """Python would complain about what it could not write once more when it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
