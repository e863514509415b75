"""What code in a sandbox cannot do. Every kind of sandbox that works on this machine is tried."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.judger import CodeJudgerConfig, SandboxConfig
from penstock.judger.sandbox.walls import find_walls, unprivileged_user
from penstock.rollout import Unjudged, Verdict, new_rollout

from .attacks import ATTACKS, CHEATS
from .machine import works

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


def check_attack(kind, host, answer, attack):
    before = time.time()
    files = {path: path.stat().st_mtime_ns for path in (Path("/etc"), Path("/usr"))}
    rollout = answer(host.program(attack), {"inputs": [""], "outputs": [host.token]})
    (verdict,), ready, healthy = judged(code_config(kind), rollout)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.score == 0.0
    said = verdict.text
    signs = ("attached", "read ", "listening", "a namespace", "mounted", "limited", "changed", "held", "many", "deep")
    for sign in signs:
        assert f"printed '{sign}" not in said, said
    assert ready == 2  # the pool is at its full size again
    assert healthy == Verdict(1.0, {"tests_passed": 1.0})
    # The host is as it was.
    assert host.secret.read_text() == host.token
    assert not host.outside.exists()
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert host.met == [] and host.was_sent() == b""
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
def test_a_wrong_answer_does_not_pass_whatever_it_does_to_its_tests(kind, answer):
    verdicts, ready, healthy = judged(code_config(kind), *(answer(code, ADD_TESTS) for code in CHEATS.values()))
    scores = {cheat: getattr(verdict, "score", verdict) for cheat, verdict in zip(CHEATS, verdicts, strict=True)}
    assert scores == dict.fromkeys(CHEATS, 0.0)
    assert ready == 2
    assert healthy.score == 1.0


def test_wrong_answers_do_not_pass_whatever_they_do_to_their_tests(answer):
    chosen = ["equals everything", "patches assert", "patches builtins that tests use", "exits at once"]
    chosen += ["is nothing apart from everything", "is nothing apart from everything, an operation later"]
    chosen += ["patches a module that tests use", "writes a verdict to every descriptor", "looks at its callers"]
    verdicts, _, _ = judged(code_config("auto"), *(answer(CHEATS[cheat], ADD_TESTS) for cheat in chosen))
    assert [verdict.score for verdict in verdicts] == [0.0] * len(chosen)


@pytest.mark.parametrize("test", ["abs(add(2, 3) - 5) < 1e-9", "(5 - add(2, 3)) ** 2 < 1e-9", "not (add(2, 3) - 5)"])
def test_a_difference_that_the_code_itself_reckons_is_not_believed(answer, test):
    near = [CHEATS[name] for name in CHEATS if name.startswith("is nothing apart")]
    verdicts, _, _ = judged(code_config("auto"), *(answer(code, [f"assert {test}"]) for code in near))
    assert [verdict.score for verdict in verdicts] == [0.0] * len(near)


def test_fractions_decimals_and_classes_that_reckon_and_order_are_tested_as_usual(answer):
    code = """
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
def half(x): return Fraction(x, 2)
def price(x): return Decimal(x) / 100
@dataclass(order=True)
class Pair:
    x: int
    y: int
    def __add__(self, other): return Pair(self.x + other.x, self.y + other.y)
    def __mul__(self, number): return Pair(self.x * number, self.y * number)
    def __abs__(self): return self.x + self.y
"""
    tests = [
        "from fractions import Fraction\nassert half(3) == Fraction(3, 2) and abs(half(3) - 1.5) < 1e-9",
        "from decimal import Decimal\nassert price(250) == Decimal('2.5') and round(price(250)) == 2",
        "assert Pair(1, 2) + Pair(3, 4) == Pair(4, 6) and abs(Pair(3, 4)) == 7",
        "assert Pair(1, 2) * 3 == Pair(3, 6) and (Pair(1, 2) * 3).y == 6",
        "assert Pair(1, 2) < Pair(2, 1) and not Pair(1, 2) >= Pair(2, 1) and max(Pair(1, 2), Pair(5, 0)).x == 5",
    ]
    (verdict,), _, _ = judged(code_config("auto"), answer(code, tests))
    assert verdict == Verdict(1.0, {"tests_passed": 1.0})


def test_a_number_that_is_too_large_is_wrong_and_nothing_else(answer):
    returned = {"10**400": 1.5, "10**5000": 3, "{10**5000: 1}": {"a": 1}, "[10**5000]": [2.5]}
    rollouts = [
        answer(f"def f(): return {value}", {"fn_name": "f", "inputs": [[]], "outputs": [wanted]})
        for value, wanted in returned.items()
    ]
    verdicts, _, _ = judged(code_config("auto"), *rollouts)
    assert [verdict.score for verdict in verdicts] == [0.0] * 4
    assert all("a number that is too large" in verdict.text for verdict in verdicts)


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


@pytest.mark.parametrize("depth", [500, 5000])
def test_nothing_that_code_wrote_is_left_however_deep_it_lies(host, answer, tmp_path, monkeypatch, depth):
    works("limits")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = host.program("directories without end").replace("10000", str(depth))
    (verdict,), _, _ = judged(code_config("limits"), answer(code, {"inputs": [""], "outputs": ["deep"]}))
    assert (verdict.score, verdict.text) == (0.0, "test 1 of 1: it wrote too much")
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("penstock-run-")]


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
