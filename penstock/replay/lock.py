"""One process per run directory.

The lock is the kernel's: it goes with the process, however that ends. The file's content only says who holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path

import msgspec

from penstock.errors import LedgerError, StorageError

LOCK_FILE = "ledger.lock"


class Holder(msgspec.Struct, frozen=True):
    pid: int
    host: str


INHERITED_S = 5.0
"""How long a process that is gone may still hold the lock, see `_lock`."""

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
            _lock(descriptor, fcntl.LOCK_EX, path)
        except BaseException:
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


def lock_directory(run_dir: Path) -> RunLock:
    """Make a run directory this process's own. Raises LedgerError when another has it, StorageError from the disk."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return RunLock(run_dir / LOCK_FILE)
    except OSError as error:
        raise StorageError(f"{run_dir} cannot be written: {error}") from error


def check_free(path: Path) -> None:
    """Raises LedgerError with the holder's pid and host when another process has this lock. Takes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return  # nobody ever had it, or it cannot be looked at; taking it will tell
    try:
        _lock(descriptor, fcntl.LOCK_SH, path)
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
        # Killed, but its parent has not asked how it ended.
        return Path(f"/proc/{holder.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except ProcessLookupError:
        return True
    except (OSError, IndexError):
        return False


def _lock(descriptor: int, how: int, path: Path) -> None:
    deadline = time.monotonic() + INHERITED_S
    while True:
        try:
            return fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_holder(path)
            if holder is None or not has_ended(holder) or time.monotonic() > deadline:
                raise _in_use(path) from None
        # Killed while it started another process, a holder leaves the lock to that one for the moment until its exec.
        # The kernel tells nobody when a lock gets free, except those who would wait for ever.
        time.sleep(0.005)


def _in_use(path: Path) -> LedgerError:
    holder = read_holder(path)
    who = f"process {holder.pid} on host {holder.host}" if holder else "another process"
    return LedgerError(f"{path.parent} is in use by {who}; end that process or use another run directory")
