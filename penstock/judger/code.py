"""Code as the answer: it is run in a sandbox against the row's tests.

    programs     each test is a run: standard input in, standard output compared here
    calls        each test is a run: arguments in, value compared here
    Python       the code in one sandbox, the tests in another, which asks the first and compares

So no right answer is ever where the code is, and no verdict passes through its hands. Code that fails, hangs, exits or
breaks out of a limit has failed its test: score 0. Where the sandbox itself fails, there is no verdict.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

import msgspec
import pydantic

from penstock.judger.code_tests import (
    CallTests,
    NoTests,
    ProgramTests,
    PythonTests,
    Tests,
    code_in,
    read_tests,
    same_output,
    same_value,
)
from penstock.judger.contract import Answer, Calls, ContractConfig, ContractJudger, Seconds, Try
from penstock.judger.failure import CallFailed
from penstock.judger.sandbox.box import Report, Sandbox
from penstock.judger.sandbox.config import SandboxConfig
from penstock.judger.sandbox.inside import wire
from penstock.judger.sandbox.pool import SandboxPool
from penstock.ports import Judger, Local, Placement
from penstock.rollout import Group, Verdict

CLOCK_SHARE = 3.0
"""How much longer than its seconds of computing a run may take by the clock: machines are busy."""
GRACE_S = 5.0
"""From a run's own deadline to that of its report."""


class CodeJudgerConfig(ContractConfig):
    """Runs the code in an answer against the row's tests, in a sandbox."""

    sandbox: SandboxConfig = SandboxConfig()
    """Where it is run, and within which limits."""
    score: Literal["all", "share"] = "all"
    """all: 1 when every test passed, else 0, and the first failure ends it. share: the share of tests that passed."""
    test_timeout_s: Seconds = 4.0
    """Seconds of computing for one test; by the clock three times as long."""
    tests_timeout_s: Seconds = 60.0
    """By the clock, for all tests of an answer; what is not done then has failed."""
    timeout_s: Seconds = 120.0
    """Deadline of one call, all tests included, counted from when it is its turn."""
    max_retries: Annotated[int, pydantic.Field(ge=0)] = 1
    """How often a call that gave no verdict is repeated."""

    @property
    def actors_name(self) -> str:
        return "judger of code"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.test_timeout_s > self.tests_timeout_s:
            yield (
                f"test_timeout_s is {self.test_timeout_s:g}; it must not be above tests_timeout_s, the time for all "
                f"tests, which is {self.tests_timeout_s:g}"
            )
        if self.tests_timeout_s + GRACE_S >= self.timeout_s:
            yield (
                f"tests_timeout_s is {self.tests_timeout_s:g} and timeout_s {self.timeout_s:g}; slow code must end "
                f"{GRACE_S:g} s before the call does"
            )

    def build(self, placement: Placement = Local()) -> Judger:  # noqa: B008 - it has no state
        """Raises ConfigError when no sandbox works on this machine."""
        return self.placed(placement, CodeJudger)


class Outcome(msgspec.Struct, frozen=True):
    """Of one test."""

    passed: bool
    reason: str = ""


class CodeJudger(ContractJudger):
    def __init__(self, config: CodeJudgerConfig) -> None:
        super().__init__("code in a sandbox", config)
        self._config = config
        self._calls = Calls()
        self.pool = SandboxPool(config.sandbox)

    async def call(self, group: Group, turn: Try) -> list[Answer]:
        (rollout,) = group
        try:
            tests = read_tests(rollout.ground_truth, rollout.extra_info)
        except NoTests as error:
            raise CallFailed("abstention", str(error), way=str(error), may_pass=False) from None
        code = code_in(rollout.response_text)
        number = 2 if isinstance(tests, PythonTests) else 1
        async with self.pool.take(number, turn.wait_until) as boxes:
            return [await self._calls.within(self._config.timeout_s, self._verdict(boxes, code, tests))]

    async def _verdict(self, boxes: list[Sandbox], code: str, tests: Tests) -> Verdict:
        number = len(tests.tests) if isinstance(tests, PythonTests) else len(tests.inputs)
        outcomes: list[Outcome] = []
        async for outcome in self._outcomes(boxes, code, tests):
            outcomes.append(outcome)
            if not outcome.passed and self._config.score == "all":
                break
        # Python tests say themselves how many they are.
        number = max(number, len(outcomes))
        passed = sum(outcome.passed for outcome in outcomes)
        wrong = next(((i, one.reason) for i, one in enumerate(outcomes, start=1) if not one.passed), None)
        text = None if wrong is None else f"test {wrong[0]} of {number}: {wrong[1]}"
        share = passed / number
        score = share if self._config.score == "share" else float(passed == number)
        return Verdict(score, {"tests_passed": share}, text)

    async def _outcomes(self, boxes: list[Sandbox], code: str, tests: Tests) -> AsyncIterator[Outcome]:
        if isinstance(tests, PythonTests):
            for outcome in await self._python(boxes[0], boxes[1], code, tests):
                yield outcome
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.tests_timeout_s
        clock_s = min(CLOCK_SHARE * self._config.test_timeout_s, self._config.tests_timeout_s)
        await boxes[0].begin(_job(code, tests), timeout_s=clock_s, cpu_s=self._config.test_timeout_s)
        for number in range(len(tests.inputs)):
            left = until - loop.time()
            if left <= 0:
                yield Outcome(False, "the time for all tests was used up")
                return
            try:
                report = await boxes[0].report(min(left, clock_s + GRACE_S))
            except CallFailed:
                if loop.time() >= until:
                    yield Outcome(False, "the time for all tests was used up")
                    return
                raise
            yield _compared(report, tests, number)

    async def _python(self, code_box: Sandbox, test_box: Sandbox, code: str, tests: PythonTests) -> list[Outcome]:
        """The code serves its functions in one sandbox, and the tests call them from the other."""
        seconds = min(self._config.tests_timeout_s, CLOCK_SHARE * self._config.test_timeout_s * len(tests.tests))
        cpu_s = self._config.test_timeout_s * len(tests.tests)
        ends = socket.socketpair()
        try:
            served = {"role": "serve", "code": code, "inputs": [None]}
            asked = {"role": "test", "code": "", "inputs": [None], "tests": tests.tests, "setup": tests.setup}
            asked["subjects"] = tests.subjects
            await code_box.begin(served, timeout_s=seconds, cpu_s=cpu_s, peer=ends[0])
            await test_box.begin(asked, timeout_s=seconds, cpu_s=cpu_s, peer=ends[1])
        finally:
            for end in ends:
                end.close()
        report = await test_box.report(seconds + GRACE_S)
        try:
            outcome = wire.loads(report.result) if report.result else {}
        except ValueError:
            outcome = {}
        if "cannot" in outcome:
            raise CallFailed("abstention", str(outcome["cannot"]), way=str(outcome["cannot"]), may_pass=False)
        if "tests" in outcome and not report.failure():
            return [Outcome(bool(passed), str(said)) for passed, said in outcome["tests"]]
        if "ended" in outcome or report.ended == "timeout":
            return [Outcome(False, await self._why(code_box) or str(outcome.get("ended", "it took too long")))]
        raise CallFailed("worker_death", f"the sandbox of the tests failed: {report.failure() or 'no outcome'}")

    async def _why(self, box: Sandbox) -> str:
        """How the code ended that its tests waited for."""
        try:
            return (await box.report(GRACE_S)).failure()
        except CallFailed:
            return ""

    async def metrics(self) -> dict[str, float]:
        return self.contract.metrics() | {"sandboxes_started": self.pool.started}

    async def close(self) -> None:
        self._calls.close()
        await self.pool.close()


def _job(code: str, tests: ProgramTests | CallTests) -> dict[str, Any]:
    if isinstance(tests, ProgramTests):
        given = [base64.b64encode(text.encode("utf-8", "surrogatepass")).decode() for text in tests.inputs]
        return {"role": "program", "code": code, "inputs": given}
    try:
        packed = [wire.pack(arguments) for arguments in tests.inputs]
    except wire.Unsendable as error:
        raise CallFailed("abstention", f"an argument of the tests: {error}", way=str(error), may_pass=False) from None
    return {"role": "call", "code": code, "inputs": packed, "function": tests.function}


def _compared(report: Report, tests: ProgramTests | CallTests, number: int) -> Outcome:
    if failure := report.failure():
        return Outcome(False, failure)
    if isinstance(tests, ProgramTests):
        printed = report.stdout.decode("utf-8", "replace")
        if same_output(printed, tests.outputs[number]):
            return Outcome(True)
        return Outcome(False, f"it printed {printed[:80]!r}, and not {tests.outputs[number][:80]!r}")
    try:
        value = wire.unpack(wire.loads(report.result))
    except (ValueError, RecursionError):
        return Outcome(False, "it returned nothing that can be compared")
    try:
        if same_value(value, tests.outputs[number]):
            return Outcome(True)
        shown = repr(value)[:80]
    except (ValueError, ArithmeticError):  # an integer with more digits than Python writes, or than a float has
        shown = "a number that is too large"
    return Outcome(False, f"it returned {shown}, and not {repr(tests.outputs[number])[:80]}")
