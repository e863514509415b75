"""One process per run directory.

The lock is the kernel's: it goes with the process, however that ends. The file's content only says who holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

import msgspec

from penstock.errors import LedgerError


class Holder(msgspec.Struct, frozen=True):
    pid: int
    host: str


_held: set[int] = set()


def _close_in_child() -> None:
    # A forked child shares the open file and would keep the lock after this process is killed.
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    def __init__(self, path: Path) -> None:
        """Take the lock at once. Raises LedgerError with the holder's pid and host when another has it."""
        self._descriptor: int | None = None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise _in_use(path) from None
        except OSError:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(Holder(os.getpid(), socket.gethostname())), 0)
        self._descriptor = descriptor
        _held.add(descriptor)

    def release(self) -> None:
        """Idempotent. The file stays: removing it would race with the next holder."""
        if self._descriptor in _held:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None


def check_free(path: Path) -> None:
    """Raises LedgerError with the holder's pid and host when another process has this lock. Takes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return  # nobody ever had it, or it cannot be looked at; taking it will tell
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path) from None
    finally:
        os.close(descriptor)


def read_holder(path: Path) -> Holder | None:
    """Who took the lock last; None when nobody did, or is doing so right now."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    except (OSError, msgspec.DecodeError):
        return None


def has_ended(holder: Holder) -> bool:
    """Whether that process is certainly gone; one on another host may live."""
    if holder.host != socket.gethostname():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _in_use(path: Path) -> LedgerError:
    holder = read_holder(path)
    who = f"process {holder.pid} on host {holder.host}" if holder else "another process"
    return LedgerError(f"{path.parent} is in use by {who}; end that process or use another run directory")
