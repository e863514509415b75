"""What keeps code in, and which of it works on this machine.

    bubblewrap   the program `bwrap`: namespaces of processes, files, network, users; all of it
    namespaces   the same made here (`inside/enter.py`), where bwrap is not installed
    limits       resource limits, refused system calls, and Landlock; for machines that allow no namespaces, such as
                 most containers. Where the kernel has no Landlock the code opens no file at all

Each is tried once by running a line of code in it. Whoever starts Penstock, the code runs as an unprivileged user of
the machine: process limits do not bind root.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.judger.sandbox.config import Kind, SandboxConfig
from penstock.judger.sandbox.inside import guard

INSIDE = Path(__file__).parent / "inside"
HOME = "/keeper"
"""Where the programs of `inside/` are, in a sandbox with files of its own."""
TRIAL_TIMEOUT_S = 20.0
PACK_TIMEOUT_S = 120.0

_KEEPER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from inside import keeper; "
    "keeper.main(int(sys.argv[2]), *sys.argv[3:])"
)
_PACK = "import sys; sys.path.insert(0, sys.argv[1]); from inside import library; library.pack(*sys.argv[2:])"
_ENTER = "import sys; sys.path.insert(0, sys.argv[1]); from inside import enter; enter.main(sys.argv[2:])"
_WHERE = "import json, sys; print(json.dumps([sys._base_executable, sys.base_prefix, sys.base_exec_prefix]))"
_TRIAL = "import sys; print(sys.base_prefix)"
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


class Python(NamedTuple):
    executable: str
    prefix: str
    """Where it finds its own library."""
    prefixes: tuple[str, ...]
    """Directories it needs besides /usr."""


class Walls:
    """One way to keep code in, with one interpreter. Its programs are copied to a directory that any user can read."""

    def __init__(self, kind: Kind, python: Python, config: SandboxConfig) -> None:
        self.kind = kind
        self.python = python
        self._config = config
        self.home = Path(tempfile.mkdtemp(prefix="penstock-sandbox-"))
        weakref.finalize(self, _remove, self.home, os.getpid())
        self.home.chmod(0o755)
        package = self.home / "inside"
        package.mkdir(mode=0o755)
        for path in INSIDE.glob("*.py"):
            (package / path.name).write_bytes(path.read_bytes())
        # Compiled once, by the interpreter that will run it.
        self._run("-m", "compileall", "-q", str(package))

    @functools.cached_property
    def archive(self) -> Path:
        """Of the modules, for code that may open no file."""
        path = self.home / "library.zip"
        self._run("-c", _PACK, str(self.home), str(path), *self.paths)
        return path

    def _run(self, *arguments: str) -> None:
        command = [self.python.executable, "-I", "-S", *arguments]
        subprocess.run(command, env={}, cwd="/", timeout=PACK_TIMEOUT_S, check=False, capture_output=True)

    @property
    def namespaces(self) -> bool:
        return self.kind != "limits"

    @property
    def files(self) -> bool:
        """Whether the code may open any: where nothing tells its own from others', it may not."""
        return self.namespaces or guard.landlock_version() > 0

    @property
    def paths(self) -> list[str]:
        """Whose modules the code may import."""
        return [str(path.resolve()) for path in self._config.paths]

    @property
    def readable(self) -> list[str]:
        """Directories that the code may read."""
        return ["/usr", *_SYSTEM, "/etc/ld.so.cache", *self.python.prefixes, *self.paths]

    def limits(self, *, timeout_s: float, cpu_s: float) -> dict[str, Any]:
        """Of one run, for a keeper."""
        limits = guard.Limits(
            timeout_s=timeout_s,
            cpu_s=cpu_s,
            max_memory=self._config.max_memory,
            max_processes=self._config.max_processes,
            max_output=self._config.max_output,
            max_files_bytes=self._config.max_files_bytes,
            namespaces=self.namespaces,
            readable=() if self.namespaces else self.readable,
            files=self.files,
        )
        return limits._asdict()

    def not_stopped(self) -> list[str]:
        """What code can do here that it could not with bubblewrap, in words."""
        if self.namespaces:
            return []
        found = []
        if os.getuid():
            found.append(f"it is the same user as Penstock ({os.getuid()}), so its processes count with the others'")
        found.append("seeing the name of the machine and the numbers of processes")
        return found

    def command(self, descriptor: int, workdir: Path | None, uid: int | None) -> list[str]:
        """How a keeper is started. `uid` is the user it becomes, where this process is root."""
        python = [self.python.executable, "-I", "-S", "-B", "-X", "utf8", "-c"]
        if self.kind == "bubblewrap":
            keeper = [*python, _KEEPER, HOME, str(descriptor)]
            return [*_as_user(uid), *self._bubblewrap(), "--", *keeper]
        if self.kind == "namespaces":
            settings = json.dumps(
                {
                    "uid": uid,
                    "binds": [*self._binds()],
                    "links": [*self._links()],
                    "tmp_bytes": self._config.max_files_bytes,
                }
            )
            return [*python, _ENTER, str(self.home), str(descriptor), str(os.getpid()), settings]
        archive = [] if self.files else [str(self.archive)]
        return [*_as_user(uid), *python, _KEEPER, str(self.home), str(descriptor), *archive]

    def _binds(self) -> Iterator[tuple[str, str]]:
        """(where it is, where it is seen), read-only."""
        yield "/usr", "/usr"
        yield str(self.home), HOME
        for name in _SYSTEM:
            if Path(name).is_dir() and not Path(name).is_symlink():
                yield name, name
        for path in (*self.python.prefixes, *self.paths):
            yield path, path

    def _links(self) -> Iterator[tuple[str, str]]:
        for name in _SYSTEM:
            if Path(name).is_symlink():
                yield os.readlink(name), name  # noqa: PTH115 - as it is written

    def _bubblewrap(self) -> list[str]:
        command = ["bwrap", "--unshare-all", "--as-pid-1", "--die-with-parent", "--clearenv"]
        command += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
        # First: a directory that is shown may be one of /tmp.
        command += ["--size", str(self._config.max_files_bytes), "--tmpfs", "/tmp"]
        for source, target in self._binds():
            command += ["--ro-bind", source, target]
        for target, path in self._links():
            command += ["--symlink", target, path]
        command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        return [*command, "--remount-ro", "/", "--chdir", "/tmp"]


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a forked child that ends
        shutil.rmtree(directory, ignore_errors=True)


def _as_user(uid: int | None) -> list[str]:
    """`setpriv` where there is one: to change the user between fork and exec, Python copies the page tables of this
    process, which may be those of a trainer."""
    if uid is None or shutil.which("setpriv") is None:
        return []
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]


def start(walls: Walls, descriptor: int, workdir: Path | None, uid: int | None) -> subprocess.Popen[bytes]:
    """Raises OSError."""
    command = walls.command(descriptor, workdir, uid)
    changes: dict[str, Any] = {}
    if uid is not None and walls.kind != "namespaces" and command[0] != "setpriv":
        changes = {"user": uid, "group": uid, "extra_groups": []}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PATH": os.defpath},
        cwd=str(workdir or "/"),
        pass_fds=(descriptor,),
        start_new_session=True,
        **changes,
    )


def unprivileged_user() -> int | None:
    """A user of the machine that nobody else is, as far as can be told; None where this process is not root."""
    if os.getuid():
        return None
    last = 0
    with contextlib.suppress(OSError, ValueError):
        rows = [list(map(int, row.split())) for row in Path("/proc/self/uid_map").read_text().splitlines()]
        last = max(first + count for first, _, count in rows) - 1
    if last > 2_100_000_000:
        return random.randrange(2_000_000_000, 2_100_000_000)
    return random.randrange(max(1, last // 2), max(2, last - 1))


def find_walls(config: SandboxConfig) -> Walls:
    """The first kind and interpreter that work here. Raises ConfigError with what is wrong with each."""
    return _found(config.model_dump_json())


@functools.lru_cache(maxsize=16)
def _found(described: str) -> Walls:
    config = SandboxConfig.model_validate_json(described)
    kinds: tuple[Kind, ...] = ("bubblewrap", "namespaces", "limits") if config.kind == "auto" else (config.kind,)
    reasons: list[str] = []
    for kind in kinds:
        if kind == "bubblewrap" and shutil.which("bwrap") is None:
            reasons.append("bubblewrap: there is no bwrap")
            continue
        for python in _pythons(config):
            walls = Walls(kind, python, config)
            problem = _unreadable(walls) or _try(walls)
            if problem is None:
                return walls
            reasons.append(f"{kind} with {python.executable}: {problem}")
    raise ConfigError(
        ["no sandbox works on this machine, and code that a model wrote is not run without one", *reasons]
    )


def _pythons(config: SandboxConfig) -> Iterator[Python]:
    wanted = [config.python] if config.python is not None else [sys.executable, "/usr/bin/python3", "python3"]
    seen: set[str] = set()
    for name in wanted:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            done = subprocess.run([path, "-I", "-S", "-c", _WHERE], capture_output=True, timeout=TRIAL_TIMEOUT_S)
            executable, *prefixes = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            continue
        if executable in seen:
            continue
        seen.add(executable)
        needed = {str(Path(prefix).resolve()) for prefix in prefixes}
        yield Python(
            str(Path(executable).resolve()),
            prefixes[0],
            tuple(sorted(prefix for prefix in needed if prefix != "/usr" and not prefix.startswith("/usr/"))),
        )


def _unreadable(walls: Walls) -> str | None:
    """Which of the modules that the code was promised it could not have."""
    if walls.files:
        return None
    for path in walls.paths:
        if found := next(Path(path).rglob("*.so"), None):
            return f"there is no Landlock, so that code can open no file, and {found} cannot be imported without"
    return None


def _try(walls: Walls) -> str | None:
    """Run a line of code; None when it ran, as nobody of importance."""
    ours, theirs = socket.socketpair()
    ours.settimeout(TRIAL_TIMEOUT_S)
    uid = unprivileged_user()
    with contextlib.ExitStack() as stack:
        stack.callback(ours.close)
        workdir = None
        if not walls.namespaces:
            workdir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-run-")))
            if uid is not None:
                os.chown(workdir, uid, uid)
        try:
            process = start(walls, theirs.fileno(), workdir, uid)
        except OSError as error:
            return str(error)
        finally:
            theirs.close()
        stack.callback(_end, process)
        try:
            ready = _receive(ours)
            limits = walls.limits(timeout_s=TRIAL_TIMEOUT_S, cpu_s=TRIAL_TIMEOUT_S)
            job = {"role": "program", "code": _TRIAL, "inputs": [""], "limits": limits}
            body = json.dumps(job).encode()
            ours.sendall(struct.pack(">I", len(body)) + body)
            report = _receive(ours)
        except (OSError, EOFError, ValueError) as error:
            process.kill()
            assert process.stderr is not None
            said = process.stderr.read().decode(errors="replace").strip()[-300:]
            return said or f"{type(error).__name__}: {error}"
        if os.getuid() == 0 and not _is_unprivileged(process.pid, walls):
            return f"the code would run as root: {ready}"
        found = base64.b64decode(report.get("stdout", "")).decode(errors="replace").strip()
        if not found:
            return f"a line of code did not run: {report}"
        if found != walls.python.prefix:  # one that may not read its own library takes another's
            return f"its library is {walls.python.prefix}, and inside it found {found}"
    return None


def _is_unprivileged(pid: int, walls: Walls) -> bool:
    """By what the machine says of the keeper, whose children run the code."""
    for child in (pid, *_children(pid)):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{child}/status").read_text().splitlines()
            users = next(line for line in lines if line.startswith("Uid:")).split()[1:]
            if "0" in users:
                return False
    return True


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _receive(channel: socket.socket) -> dict[str, Any]:
    def read(size: int) -> bytes:
        body = b""
        while len(body) < size:
            chunk = channel.recv(size - len(body))
            if not chunk:
                raise EOFError("it ended")
            body += chunk
        return body

    (size,) = struct.unpack(">I", read(4))
    answer: dict[str, Any] = json.loads(read(size))
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stderr is not None:
        process.stderr.close()
