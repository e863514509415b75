"""The threads that torch computes with, given back by whoever rests.

Every thread that calls torch gets a team of helper threads of its own (libgomp). A waiting helper spins for its next
piece of work, but only while a process has no more of them than cores; beyond that it sleeps at once and the kernel has
to wake it for every operation, which doubles the time of a step made of many small ones. So a thread that computed and
now rests (the engine while the trainer works, the trainer while the engine works) gives its team back.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

_SOFT = 1


def release_threads() -> None:
    """Give back the team of the calling thread. Its next operation makes a new one, in some microseconds."""
    _pause()(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int]:
    try:
        pause = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libgomp.so.1")).omp_pause_resource_all
    except (OSError, AttributeError):
        return lambda kind: 0  # Another OpenMP library, or none.
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    found: Callable[[int], int] = pause
    return found
