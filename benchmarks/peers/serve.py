"""The child's side of a comparison. Runs in the environments of others: nothing of Penstock, only the standard library.

The first line of stdin is the job. Every later line is a request, answered by one line. What libraries print goes to
stderr, so that stdout holds answers alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any, NoReturn

_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
# The kernel ends this process with the benchmark that started it.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def next_line() -> dict[str, Any]:
    """The job, then the next request; ends the process when there is none."""
    line = sys.stdin.readline()
    if not line:
        stop()
    message: dict[str, Any] = json.loads(line)
    return message


def answer(**fields: Any) -> None:
    print(json.dumps(fields), file=_answers, flush=True)


def stop() -> NoReturn:
    """At once: what a library does at its end is not part of a comparison."""
    os._exit(0)
