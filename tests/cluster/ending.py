"""What a `penstock` that was started here said, or where it stands when it does not end."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

EVENTS = 25


def output_of(process: subprocess.Popen[str], run: Path, timeout: float) -> str:
    """All of it. One that does not end in time is ended; the failure has its stacks and what it told last."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        # It was started with PYTHONFAULTHANDLER: it tells where its threads are, and dies.
        process.send_signal(signal.SIGABRT)
        said = process.communicate(timeout=60)[0]
        events = (run / "events.jsonl").read_text().splitlines()[-EVENTS:] if (run / "events.jsonl").exists() else []
        told = "\n".join(events)
        raise AssertionError(f"not over after {timeout:g} s\n{said}\nwhat it told last:\n{told}") from None
