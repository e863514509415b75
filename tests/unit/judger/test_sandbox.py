"""What code in a sandbox cannot do. Every kind of sandbox that works on this machine is tried."""

import asyncio
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.judger import CodeJudgerConfig, SandboxConfig
from penstock.judger.sandbox.walls import find_walls, unprivileged_user
from penstock.rollout import Unjudged, Verdict, new_rollout

from .attacks import ATTACKS, CHEATS, FIND

KINDS = ["bubblewrap", "namespaces", "limits"]
FAST_ATTACKS = ["killing the parent", "the right answer in files", "network", "environment secrets", "writing outside"]
ADD_TESTS = {
    "test_list": [
        "assert add(1, 2) == 3",
        "assert abs(add(2, 3) - 5) < 1e-9",
        "assert math.isclose(add(4, 4), 8)",
        "assert add(1, 1) in [2] and round(add(2, 2)) == 4",
    ],
    "test_setup_code": "import math",
}


def works(kind):
    try:
        find_walls(SandboxConfig(kind=kind))
    except ConfigError as error:
        pytest.skip(f"NO {kind} ON THIS MACHINE: {error}")


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    works(request.param)
    return request.param


@pytest.fixture
def answer():
    def make(code, tests, **extra_info):
        rollout = new_rollout("Write it.", ground_truth=tests, extra_info=extra_info)
        rollout.response_text = code
        return rollout

    return make


def judged(config, *rollouts):
    """The answers, how many sandboxes are ready after them, and what a right program gets then."""

    async def run():
        judger = config.build()
        try:
            answers = await asyncio.gather(*map(judger.judge, rollouts))
            judger.pool.fill()
            ready = judger.pool.ready
            healthy = new_rollout("Say it.", ground_truth={"inputs": [""], "outputs": ["well"]})
            healthy.response_text = "print('well')"
            return answers, ready, await judger.judge(healthy)
        finally:
            await judger.close()

    return asyncio.run(run())


def code_config(kind, **fields):
    sandbox = SandboxConfig(kind=kind, warm=2, max_memory=192 << 20, max_files_bytes=16 << 20)
    return CodeJudgerConfig(sandbox=sandbox, max_retries=0, **({"test_timeout_s": 1.0} | fields))


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
            "MARKER": self.marker,
        }
        return "".join(f"{name} = {value!r}\n" for name, value in given.items()) + FIND + ATTACKS[attack]

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
        self.knows.kill()
        self.knows.wait()


@pytest.fixture
def host(tmp_path, monkeypatch):
    made = Host(tmp_path)
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", made.token)
    yield made
    made.close()


def check_attack(kind, host, answer, attack):
    before = time.time()
    files = {path: path.stat().st_mtime_ns for path in (Path("/etc"), Path("/usr"))}
    rollout = answer(host.program(attack), {"inputs": [""], "outputs": [host.token]})
    (verdict,), ready, healthy = judged(code_config(kind), rollout)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.score == 0.0
    said = verdict.text
    for sign in ("attached", "read ", "listening", "a namespace", "mounted", "limited", "changed"):
        assert f"printed '{sign}" not in said, said
    assert ready == 2  # the pool is at its full size again
    assert healthy == Verdict(1.0, {"tests_passed": 1.0})
    # The host is as it was.
    assert host.secret.read_text() == host.token
    assert not host.outside.exists()
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert host.met == []
    assert host.knows.poll() is None
    assert abs(time.time() - before) < 300
    until = time.monotonic() + 10
    while host.daemons() and time.monotonic() < until:
        time.sleep(0.02)
    assert host.daemons() == []


@pytest.mark.long_tier
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_contained_and_the_host_is_unchanged(kind, host, answer, attack):
    check_attack(kind, host, answer, attack)


@pytest.mark.parametrize("attack", FAST_ATTACKS)
def test_the_sandbox_that_this_machine_has_contains(host, answer, attack):
    check_attack("auto", host, answer, attack)


@pytest.mark.parametrize(
    "attack", ["network", "the right answer in files", "environment secrets", "/proc of others", "symlinks out"]
)
def test_without_a_sandbox_the_same_code_finds_the_right_answer(host, tmp_path, attack):
    command = [sys.executable, "-c", host.program(attack)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert host.token in done.stdout


@pytest.mark.parametrize(
    ("attack", "limit"),
    [
        ("fork bomb of sleepers", "it took too long"),
        ("memory bomb", "MemoryError"),
        ("memory bomb of several processes", "it used too much memory"),
        ("endless output", "it printed too much"),
        ("network", "it printed ''"),
    ],
)
def test_each_limit_is_what_ends_it(host, answer, attack, limit):
    (verdict,), _, _ = judged(code_config("auto"), answer(host.program(attack), {"inputs": [""], "outputs": ["-"]}))
    assert limit in verdict.text


@pytest.mark.long_tier
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_wrong_answer_does_not_pass_whatever_it_does_to_its_tests(kind, answer, cheat):
    (verdict,), ready, healthy = judged(code_config(kind), answer(CHEATS[cheat], ADD_TESTS))
    assert isinstance(verdict, Verdict), verdict
    assert verdict.score == 0.0
    assert ready == 2
    assert healthy.score == 1.0


def test_wrong_answers_do_not_pass_whatever_they_do_to_their_tests(answer):
    chosen = ["equals everything", "patches assert", "patches builtins that tests use", "exits at once"]
    chosen += ["patches a module that tests use", "writes a verdict to every descriptor", "looks at its callers"]
    verdicts, _, _ = judged(code_config("auto"), *(answer(CHEATS[cheat], ADD_TESTS) for cheat in chosen))
    assert [verdict.score for verdict in verdicts] == [0.0] * len(chosen)


def test_the_right_answer_passes(answer):
    code = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
    (verdict,), _, _ = judged(code_config("auto"), answer(code, ADD_TESTS))
    assert verdict == Verdict(1.0, {"tests_passed": 1.0})


@pytest.mark.parametrize("kind", KINDS)
def test_code_never_runs_as_root_of_the_machine(kind):
    works(kind)

    async def users():
        judger = code_config(kind).build()
        try:
            judger.pool.fill()
            async with judger.pool.take(1, asyncio.get_running_loop().time() + 30) as (box,):
                await box.begin(
                    {"role": "program", "code": "import time\ntime.sleep(60)", "inputs": [""]}, timeout_s=60, cpu_s=60
                )
                found = []
                # The code's own process, its keeper, and whoever waits outside of the namespaces.
                while len(found) < (2 if kind == "limits" else 3):
                    found = processes_below(box.process.pid)
                    await asyncio.sleep(0.01)
                return statuses_of(found)
        finally:
            await judger.close()

    statuses = asyncio.run(users())
    for status in statuses:
        (line,) = [line for line in status.splitlines() if line.startswith("Uid:")]
        assert "0" not in line.split()[1:]
        (line,) = [line for line in status.splitlines() if line.startswith("CapEff:")]
        assert int(line.split()[1], 16) == 0 or "bwrap" in status.splitlines()[0]


def statuses_of(pids):
    return [Path(f"/proc/{pid}/status").read_text() for pid in pids]


def processes_below(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        found = [int(child) for child in children.read_text().split()]
    except OSError:
        return []
    return [pid, *(below for child in found for below in processes_below(child))]


def test_root_gives_code_another_user():
    if os.getuid():
        assert unprivileged_user() is None
    else:
        assert unprivileged_user() > 0


def test_limits_alone_say_what_they_do_not_stop(answer, caplog):
    works("limits")
    code = "import os\nprint(os.uname().nodename)"
    tests = {"inputs": [""], "outputs": [socket.gethostname()]}
    (verdict,), _, _ = judged(code_config("limits"), answer(code, tests))
    assert verdict.score == 1.0  # it is not stopped
    (record,) = [one for one in caplog.records if "does not stop" in one.message]
    assert "the name of the machine" in record.message
    assert "bubblewrap" in record.message


WITHOUT_LANDLOCK = """\
import asyncio, ctypes, json, logging, struct, sys

from penstock.judger import CodeJudgerConfig, SandboxConfig
from penstock.rollout import new_rollout

# As an older kernel: the call that makes a ruleset is not there, for this process and all below it.
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
prepared = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", len(steps), ctypes.addressof(program)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, ctypes.c_ulong(1), 0, 0, 0) == 0
assert libc.prctl(22, ctypes.c_ulong(2), ctypes.c_ulong(ctypes.addressof(prepared)), 0, 0) == 0

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("penstock").addHandler(handler)


async def judge_all(programs):
    judger = CodeJudgerConfig(sandbox=SandboxConfig(kind="limits"), max_retries=0, test_timeout_s=2.0).build()
    rollouts = []
    for code, wanted in programs:
        rollouts.append(new_rollout("Write it.", ground_truth={"inputs": [""], "outputs": [wanted]}))
        rollouts[-1].response_text = code
    try:
        return [verdict.score for verdict in await asyncio.gather(*map(judger.judge, rollouts))]
    finally:
        await judger.close()


print(json.dumps({"scores": asyncio.run(judge_all(json.load(sys.stdin))), "said": said}))
"""


@pytest.mark.long_tier
def test_limits_without_landlock_say_what_they_do_not_stop_and_stop_the_rest(host, tmp_path):
    works("limits")
    open_to_all = tmp_path / "open to all"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    wrote = open_to_all / "was-here"
    programs = [
        (host.program("the right answer in files"), host.token),
        (f"open({str(wrote)!r}, 'w').write('x' * 1000)\nprint('wrote')", "wrote"),
        (host.program("/proc of others"), host.token),
        *((host.program(attack), host.token) for attack in ("network", "environment secrets", "killing the parent")),
    ]
    command = [sys.executable, "-c", WITHOUT_LANDLOCK]
    done = subprocess.run(command, input=json.dumps(programs), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["scores"] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert wrote.stat().st_size == 1000
    (said,) = [line for line in told["said"] if "does not stop" in line]
    for gap in ("reading every file that its user may read", "the command lines of other processes among them"):
        assert gap in said
    assert "writing where everybody may" in said
    assert "filling the disk outside of its own directory" in said
    assert host.met == [] and host.knows.poll() is None


def test_bubblewrap_and_namespaces_stop_what_limits_do_not(answer):
    (verdict,), _, _ = judged(
        code_config("auto"), answer("import os\nprint(os.uname().nodename)", {"inputs": [""], "outputs": ["sandbox"]})
    )
    if find_walls(SandboxConfig()).kind == "bubblewrap":
        assert verdict.score == 1.0


def test_a_sandbox_that_cannot_be_had_is_refused():
    with pytest.raises(ConfigError, match="there is no such program"):
        SandboxConfig(python="/no/such/python").check()
    with pytest.raises(ConfigError, match="no directory"):
        SandboxConfig(paths=["/no/such/directory"]).check()
    if shutil.which("bwrap") is None:
        with pytest.raises(ConfigError, match="bubblewrap"):
            SandboxConfig(kind="bubblewrap").check()
    with pytest.raises(ConfigError, match="no sandbox works"):
        find_walls(SandboxConfig(kind="namespaces", python="/bin/false"))
    with pytest.raises(ConfigError, match="tests_timeout_s is 60 and timeout_s 30"):
        CodeJudgerConfig(timeout_s=30).check()
    with pytest.raises(ConfigError, match="test_timeout_s is 100; it must not be above tests_timeout_s"):
        CodeJudgerConfig(test_timeout_s=100).check()


def test_a_row_without_tests_is_unjudged_and_the_sandbox_is_not_asked(answer):
    rollouts = [answer("print(1)", truth) for truth in (None, 3, {}, [], {"inputs": ["a"], "outputs": []}, "")]
    answers, _, _ = judged(code_config("auto", breaker_failures=100), *rollouts)
    assert all(isinstance(one, Unjudged) for one in answers)


def test_a_pool_keeps_sandboxes_ready_and_uses_each_once():
    async def run():
        judger = code_config("auto").build()
        pool = judger.pool
        try:
            pool.fill()
            first = pool.ready
            wait_until = asyncio.get_running_loop().time() + 60
            async with pool.take(2, wait_until) as boxes:
                during, taken = pool.ready, {box.process.pid for box in boxes}
            async with pool.take(2, wait_until) as boxes:
                again = {box.process.pid for box in boxes}
            return first, during, taken & again, [box.alive for box in boxes]
        finally:
            await judger.close()
            assert pool.ready == 0

    first, during, both, _ = asyncio.run(run())
    assert first == during == 2
    assert not both
