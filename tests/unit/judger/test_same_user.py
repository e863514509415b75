"""A sandbox of limits whose code is the same user as Penstock, with Landlock and without: nothing of that user's is in
its reach."""

import json
import os
import subprocess
import sys

import pytest

from .machine import works

AS_ANOTHER_USER = """\
import asyncio, ctypes, json, logging, os, re, signal, struct, sys

from penstock.judger import CodeJudgerConfig, SandboxConfig
from penstock.rollout import new_rollout

given = json.load(sys.stdin)
libc = ctypes.CDLL(None)
if given["user"] is not None:
    os.setgroups([])
    os.setresgid(*[given["user"]] * 3)
    os.setresuid(*[given["user"]] * 3)
    libc.prctl(4, ctypes.c_ulong(1), 0, 0, 0)  # like a process that was always this user's
if not given["landlock"]:
    # As an older kernel: the call that makes a ruleset is not there, for this process and all below it.
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    prepared = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", len(steps), ctypes.addressof(program)))
    assert libc.prctl(38, ctypes.c_ulong(1), 0, 0, 0) == 0
    assert libc.prctl(22, ctypes.c_ulong(2), ctypes.c_ulong(ctypes.addressof(prepared)), 0, 0) == 0

for _ in range(given.get("beside", 0)):
    if os.fork() == 0:
        libc.prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)  # it goes with this process
        signal.pause()

said, signals = [], []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("penstock").addHandler(handler)
for number in (signal.SIGUSR2, signal.SIGIO):
    signal.signal(number, lambda number, frame: signals.append(number))
programs = {name: re.sub("(?m)^HOST_PID = .*", f"HOST_PID = {os.getpid()}", code) for name, code in given["programs"]}
before = os.sched_getaffinity(0)


def printed_without_a_sandbox(code):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(writer, 1)
        try:
            exec(code, {})
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writer)
    with open(reader) as output:
        return output.read().strip()


async def judge_all():
    judger = CodeJudgerConfig(sandbox=SandboxConfig(kind="limits", paths=given["paths"]), max_retries=0).build()
    rollouts = {}
    for name, code in programs.items():
        rollouts[name] = new_rollout("Write it.", ground_truth={"inputs": [""], "outputs": [given["wanted"]]})
        rollouts[name].response_text = code
    try:
        verdicts = await asyncio.gather(*map(judger.judge, rollouts.values()))
        return {name: (one.score, one.text) for name, one in zip(rollouts, verdicts)}
    finally:
        await judger.close()


verdicts = asyncio.run(judge_all())
unchanged = os.sched_getaffinity(0) == before and os.getpriority(os.PRIO_PROCESS, 0) == 0 and not signals
free = {name: printed_without_a_sandbox(programs[name]) for name in given["free"]}
print(json.dumps({"verdicts": verdicts, "said": said, "unchanged": unchanged, "free": free}))
"""

OTHERS = ["memory of others", "environment of others", "/proc of others", "the right answer in files"]
SAME_USER = [*OTHERS, "signals through a descriptor", "processes and files of its user", "network", "datagrams"]
SAME_USER += ["killing the parent", "writing outside", "disk fill", "symlinks out", "limits of others"]
LIBRARY = """\
import mine
import asyncio, dataclasses, datetime, decimal, encodings.idna, hashlib, json, statistics, sys, unicodedata, zlib
assert sys.stdin.read() == "" and statistics.mean([decimal.Decimal(1), 2]) == decimal.Decimal("1.5")
assert hashlib.sha256(b"").hexdigest().startswith("e3b0") and datetime.date(2024, 2, 29).weekday() == 3
print(mine.same({token!r}))
"""


def run(given):
    command = [sys.executable, "-c", AS_ANOTHER_USER]
    return subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def modules(tmp_path):
    directory = tmp_path / "modules"
    directory.mkdir()
    (directory / "mine.py").write_text("def same(value):\n    return value\n")
    return directory


@pytest.mark.long_tier
@pytest.mark.parametrize("landlock", [True, False])
@pytest.mark.parametrize("user", [None, 54321])
def test_limits_contain_code_that_is_the_same_user_with_and_without_landlock(host, modules, user, landlock):
    works("limits")
    if user is not None:
        if os.getuid():
            pytest.skip("ONLY ROOT CAN BECOME ANOTHER USER")
        os.chown(host.secret, user, user)
    was = host.secret.stat()
    programs = [(name, host.program(name)) for name in SAME_USER]
    programs.append(("right", LIBRARY.format(token=host.token)))
    # What the same user finds when nothing keeps it in: the attacks are real ones.
    free = ["memory of others", "environment of others"] if user is not None else []
    given = {"user": user, "landlock": landlock, "programs": programs, "free": free, "wanted": host.token}
    done = run(given | {"paths": [str(modules)]})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    scores = {name: score for name, (score, _) in told["verdicts"].items()}
    assert scores == dict.fromkeys(SAME_USER, 0.0) | {"right": 1.0}, told["verdicts"]
    assert not [text for _, text in told["verdicts"].values() if "printed 'changed" in str(text)]
    assert told["unchanged"]
    assert told["free"] == dict.fromkeys(free, host.token)
    assert host.secret.read_text() == host.token and not host.outside.exists()
    now = host.secret.stat()
    assert (now.st_mode, now.st_mtime_ns) == (was.st_mode, was.st_mtime_ns)
    assert host.met == [] and host.was_sent() == b"" and host.knows.poll() is None
    (said,) = [line for line in told["said"] if "does not stop" in line]
    assert ("it is the same user as Penstock" in said) == (user is not None)


FORKS = """\
import os
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
print("it had a process of its own")
"""


@pytest.mark.long_tier
@pytest.mark.parametrize(("beside", "score"), [(0, 1.0), (200, 0.0)])
def test_not_as_root_the_processes_of_code_count_with_the_others_of_its_user(beside, score):
    """What the sandbox of limits says that it does not stop: a user with many processes leaves code none."""
    works("limits")
    if os.getuid():
        pytest.skip("ONLY ROOT CAN BECOME ANOTHER USER")
    given = {"user": 54321, "landlock": True, "programs": [("forks", FORKS)], "free": [], "beside": beside}
    done = run(given | {"wanted": "it had a process of its own", "paths": []})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["verdicts"]["forks"][0] == score, told
    assert any("its processes count with the others'" in line for line in told["said"])


def test_without_landlock_modules_that_cannot_be_loaded_from_memory_are_refused(modules):
    works("limits")
    (modules / "fast.so").touch()
    given = {"user": None, "landlock": False, "programs": [], "free": [], "wanted": "", "paths": [str(modules)]}
    done = run(given)
    assert "no sandbox works on this machine" in done.stderr
    assert "code can open no file, and" in done.stderr and "fast.so cannot be imported without" in done.stderr
