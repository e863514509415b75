"""`penstock` in processes of its own that are forked from one which has imported everything.

Importing torch and transformers takes longer than most runs of a test. A command is a process like any other, with a
number, signals, an exit code and an output; only its imports were made before.

    python tests/forked_commands.py <descriptor of the socket>

A message on the socket is what to run, with two descriptors: where its output goes, and where its process number and
then its exit code are written.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.child import die_with_parent

MAX_MESSAGE = 1 << 20


def import_everything() -> None:
    """What a run imports, in this process. Raises when that started a thread: a fork would not have it."""
    import anthropic  # noqa: F401
    import openai  # noqa: F401
    import torch._dynamo  # noqa: F401 - an optimiser brings it
    import transformers.models.llama.modeling_llama  # noqa: F401 - the small models are of its kind
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401

    import penstock.agent_loop.session.server
    import penstock.cli.commands
    import penstock.engine.torch_engine
    import penstock.trainer.colocate
    import penstock.trainer.disaggregated
    import penstock.trainer.parts  # noqa: F401

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"{threads} threads after the imports; a fork would have only one of them")


class Command:
    """As a `subprocess.Popen` whose output, of both kinds, is text in a pipe."""

    def __init__(self, output: int, status: int) -> None:
        self.stdout = os.fdopen(output, encoding="utf-8", errors="replace")
        self.returncode: int | None = None
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(timeout=0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._status.readline())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        said: list[str] = []
        reading = threading.Thread(target=lambda: said.append(self.stdout.read()), daemon=True)
        deadline = None if timeout is None else time.monotonic() + timeout
        reading.start()
        reading.join(timeout)
        if reading.is_alive():
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return said[0], None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """It does not outlive this."""
        self.kill()
        self.wait()
        self.stdout.close()
        self._status.close()


class Commands:
    """The process that they are forked from, started with the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self, *arguments: str, cwd: Path, environment: Mapping[str, str]) -> Command:
        message = {"arguments": arguments, "cwd": str(cwd), "environment": dict(environment)}
        (output, writes), (status, ends) = os.pipe(), os.pipe()
        try:
            socket.send_fds(self._connected(), [json.dumps(message).encode()], [writes, ends])
        finally:
            os.close(writes)
            os.close(ends)
        return Command(output, status)

    def close(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait(timeout=60)

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, __file__, str(theirs.fileno())]
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},  # else numpy starts its threads when it is imported
                )
        return self._socket


def serve(channel: socket.socket) -> None:
    """Fork until the socket closes. Returns in a command's process, as that which is to be run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits here
    while True:
        message, descriptors, *_ = socket.recv_fds(channel, MAX_MESSAGE, 2)
        if not message:
            sys.exit()
        server = os.getpid()
        if os.fork() == 0:
            die_with_parent(server)
            channel.close()
            run(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def run(message: dict[str, Any], output: int, status: int) -> None:
    """In a process that waits for the command's: that one alone is told how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    waiting = os.getpid()
    pid = os.fork()
    if pid:
        os.close(output)
        os.write(status, f"{pid}\n".encode())
        _, ended = os.waitpid(pid, 0)
        os.write(status, f"{os.waitstatus_to_exitcode(ended)}\n".encode())
        os._exit(0)
    die_with_parent(waiting)  # none outlives the tests, however those end
    os.close(status)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(message["cwd"])
    os.environ.clear()
    os.environ.update(message["environment"])
    # As Python does when it starts, and `python -m penstock.cli` with the working directory.
    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*(path for path in more if path and path not in sys.path), *sys.path, str(Path.cwd())]
    from penstock.cli import main

    sys.argv[1:] = message["arguments"]
    sys.exit(main())


if __name__ == "__main__":
    sys.path.pop(0)  # the tests' own directory
    import_everything()
    # What was imported stays, and is not copied because somebody looks through it for garbage.
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
