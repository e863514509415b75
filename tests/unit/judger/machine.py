"""A machine that has something to lose, and which sandboxes it has."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.judger import SandboxConfig
from penstock.judger.sandbox.walls import find_walls

from .attacks import ATTACKS, FIND


def works(kind):
    try:
        find_walls(SandboxConfig(kind=kind))
    except ConfigError as error:
        pytest.skip(f"NO {kind} ON THIS MACHINE: {error}")


class Host:
    """A machine with secrets: a file, a variable, a service on the loopback, all of which know the right answer."""

    def __init__(self, directory: Path) -> None:
        self.token = f"BROKEN-{secrets.token_hex(8)}"
        self.secret = directory / "secret"
        self.secret.write_text(self.token)
        self.secret.chmod(0o666)
        for parent in (directory, *directory.parents[:-1]):
            if parent.stat().st_uid == os.getuid() and parent != Path("/tmp"):
                parent.chmod(parent.stat().st_mode | 0o055)
        self.outside = directory / "outside"
        self.marker = f"{10_000 + secrets.randbelow(10_000)}.{secrets.randbelow(10_000)}"
        # A process that knows it too.
        self.knows = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)", self.token], env={"SECRET": self.token}
        )
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.met: list[object] = []
        threading.Thread(target=self._serve, daemon=True).start()
        self._short = Path(tempfile.mkdtemp())  # an address has at most 107 letters
        self._short.chmod(0o755)
        self.datagrams = self._short / "socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._listener.bind(str(self.datagrams))
        self.datagrams.chmod(0o777)

    def _serve(self) -> None:
        while True:
            try:
                connection, address = self._server.accept()
            except OSError:
                return
            self.met.append(address)
            with connection:
                connection.sendall(self.token.encode())

    def program(self, attack: str) -> str:
        given = {
            "SECRET_FILE": str(self.secret),
            "OUTSIDE": str(self.outside),
            "PORT": self.port,
            "HOST_PID": os.getpid(),
            "DATAGRAMS": str(self.datagrams),
            "MARKER": self.marker,
            "BEGINS": self.token[:-12],
        }
        return "".join(f"{name} = {value!r}\n" for name, value in given.items()) + FIND + ATTACKS[attack]

    def was_sent(self) -> bytes:
        try:
            return self._listener.recv(100)
        except BlockingIOError:
            return b""

    def daemons(self) -> list[str]:
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    if self.marker.encode() in (path / "cmdline").read_bytes():
                        found.append(path.name)
                except OSError:
                    continue
        return found

    def close(self) -> None:
        self._server.close()
        self._listener.close()
        shutil.rmtree(self._short)
        self.knows.kill()
        self.knows.wait()
