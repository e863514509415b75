from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import LedgerError
from penstock.replay.lock import Holder, RunLock, check_free, has_ended, read_holder

HOLD = """
import sys
from pathlib import Path
from penstock.replay.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_with_pid_and_host_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(
            LedgerError, match=rf"process {holder.pid} on host {socket.gethostname()}; end that process"
        ):
            RunLock(path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        lock = RunLock(path)
    found = read_holder(path)
    assert found is not None and found.pid == os.getpid()
    lock.release()


def test_looking_whether_a_lock_is_free_takes_nothing_and_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "ledger.lock"
    check_free(path)
    assert not path.exists()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(LedgerError, match=rf"in use by process {holder.pid} on host"):
            check_free(path)
        found = read_holder(path)
        assert found is not None and not has_ended(found)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert has_ended(found)
    assert not has_ended(Holder(found.pid, "another-host"))
    check_free(path)
    RunLock(path).release()


def test_a_lock_that_a_killed_process_left_to_its_child_is_waited_for(tmp_path: Path) -> None:
    """As when it is killed while it starts another process, which lets go at its exec."""
    path = tmp_path / "ledger.lock"
    program = f"""
import fcntl, os, sys, time
from pathlib import Path
descriptor = os.open({str(path)!r}, os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
if os.fork():
    os.write(descriptor, b'{{"pid": %d, "host": "{socket.gethostname()}"}}' % os.getpid())
    os._exit(0)
print("left", flush=True)
time.sleep(0.2)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.wait() == 0
        assert holder.stdout is not None and holder.stdout.readline() == "left\n"
        RunLock(path).release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    program = f"""
import os, sys
from pathlib import Path
from penstock.replay.lock import RunLock
RunLock(Path({str(tmp_path / "l")!r}))
if os.fork() == 0:
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        assert int(parent.stdout.readline()) != parent.pid
        assert parent.wait() == -signal.SIGKILL
        RunLock(tmp_path / "l").release()
        parent.stdin.close()


def test_the_lock_is_free_after_release_and_releasing_twice_is_harmless(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "l")
    with pytest.raises(LedgerError, match="is in use by process"):
        RunLock(tmp_path / "l")
    lock.release()
    lock.release()
    RunLock(tmp_path / "l").release()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]"])
def test_a_holder_that_cannot_be_read_is_unknown(tmp_path: Path, content: bytes) -> None:
    assert read_holder(tmp_path / "absent") is None
    (tmp_path / "l").write_bytes(content)
    assert read_holder(tmp_path / "l") is None
