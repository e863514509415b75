"""Code judged by its tests: the forms that datasets have them in, and what is compared with what."""

import asyncio
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.judger import CodeJudgerConfig, SandboxConfig
from penstock.judger.code_tests import NoTests, code_in, read_tests, same_output, same_value
from penstock.judger.sandbox.inside import wire
from penstock.judger.sandbox.inside.guard import seccomp_filter
from penstock.judger.sandbox.inside.tester import needed_names
from penstock.rollout import Unjudged, Verdict, new_rollout

ADD = "def add(a, b):\n    return a + b\n"
HUMAN_EVAL = {
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate('a', 'b') == 'ab'\n",
    "entry_point": "add",
}


def judged(*answers, **fields):
    """Verdicts of (code, tests, extra information)."""

    async def run():
        judger = CodeJudgerConfig(sandbox=SandboxConfig(warm=4), max_retries=0, **fields).build()
        try:
            rollouts = []
            for code, tests, extra_info in answers:
                rollouts.append(new_rollout("Write it.", ground_truth=tests, extra_info=extra_info))
                rollouts[-1].response_text = code
            return await asyncio.gather(*map(judger.judge, rollouts))
        finally:
            await judger.close()

    return asyncio.run(run())


PASSES = [
    ("print(sum(map(int, input().split())))", {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}, {}),
    ("print(sum(map(int, open(0).read().split())))", [{"input": "1\n2", "output": "3"}], {}),
    ("if __name__ == '__main__':\n    print('main')", {"inputs": [""], "outputs": ["main"]}, {}),
    ("import sys\nprint('done')\nsys.exit()", {"inputs": [""], "outputs": ["done"]}, {}),
    (ADD, {"fn_name": "add", "inputs": [[1, 2], ["a", "b"], [[1], [2]]], "outputs": [3, "ab", [1, 2]]}, {}),
    (
        "class Solution:\n    def add(self, a, b): return a + b",
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]},
        {},
    ),
    (
        "class Solution:\n    def twice(self, x): return [2 * i for i in x]",
        [{"input": "[1, 2]", "output": "[2, 4]", "testtype": "functional"}],
        {"fn_name": "twice"},
    ),
    (f"Sure:\n```python\n{ADD}```", ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"], {}),
    (ADD, "assert add(1, 2) == 3\nassert add(2, 2) == 4", {}),
    (ADD, json.dumps(["assert add(1, 2) == 3"]), {}),
    (ADD, {"test_list": ["assert c(add(0.1, 0.2), 0.3)"], "test_setup_code": "from math import isclose as c"}, {}),
    (ADD, HUMAN_EVAL, {}),
    (ADD, {"test": HUMAN_EVAL["test"]}, {"entry_point": "add"}),
    (ADD, "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n", {}),
    ("def sort(x): x.sort()", ["a = [2, 1]\nsort(a)\nassert a == [1, 2]"], {}),
    ("def half(x):\n    if x % 2: raise ValueError('odd')\n    return x // 2",
     ["try:\n    half(3)\n    assert False\nexcept ValueError as error:\n    assert 'odd' in str(error)"], {}),
    ("def count():\n    yield from range(3)", ["assert list(count()) == [0, 1, 2]", "assert 2 in count()"], {}),
    ("class Stack:\n    def __init__(self): self.held = []\n    def push(self, x): self.held.append(x)\n"
     "    def pop(self): return self.held.pop()\n    def __len__(self): return len(self.held)",
     ["s = Stack()\ns.push((1, 'a'))\nassert len(s) == 1 and s.pop() == (1, 'a') and not s",
      "assert isinstance(Stack(), Stack)"], {}),
    ("class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
     "    def __eq__(self, o): return self.x == o.x",
     ["assert (V(1) + V(2)).x == 3", "assert V(1) + V(2) == V(3)"], {}),
    ("def big(n): return 2 ** n", ["assert big(40000) == 2 ** 40000", "assert big(3) == 8"], {}),
    ("def same(x): return x",
     ["for x in (None, 1.5, b'a', {1: (2,)}, {1, 2}, frozenset('a'), 2j):\n    assert same(x) == x"], {}),
]  # fmt: skip

FAILS = [
    ("print(3)", {"inputs": ["", ""], "outputs": ["3", "4"]}, {}, "test 2 of 2: it printed '3\\n', and not '4'"),
    ("print(3)\nraise SystemExit(1)", {"inputs": [""], "outputs": ["3"]}, {}, "it ended with status 1"),
    ("print(undefined)", {"inputs": [""], "outputs": ["3"]}, {}, "NameError: name 'undefined' is not defined"),
    ("print(", {"inputs": [""], "outputs": ["3"]}, {}, "SyntaxError"),
    (ADD, {"fn_name": "sub", "inputs": [[1, 2]], "outputs": [3]}, {}, "NameError: there is no sub"),
    ("def f(x): return object()", {"fn_name": "f", "inputs": [[1]], "outputs": [3]}, {}, "cannot be sent"),
    (ADD, ["assert add(1, 2) == 4"], {}, "test 1 of 1: AssertionError"),
    (ADD, ["assert sub(1, 2) == 4"], {}, "NameError: name 'sub' is not defined"),
    ("def sub(a, b): return 3", HUMAN_EVAL, {}, "NameError"),
    ("def add(a, b): return open('/etc/passwd').read()", ["assert add(1, 2) == 3"], {}, "FileNotFoundError"),
]

NO_VERDICT = [
    (ADD, {"fn_name": "add"}, {}, "it must have inputs and outputs, test_list, or test"),
    (ADD, ["assert add(1, 2 == 3"], {}, "the tests are no Python"),
    (ADD, ["import no_such_module\nassert add(1, 2) == 3"], {}, "the tests import what is not there"),
    (ADD, {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "1 / 0"}, {}, "raised ZeroDivisionError"),
    (ADD, ["assert add(1, object()) == 3"], {}, "an argument cannot be sent"),
    (ADD, 17, {}, "the ground truth is a int; it must hold tests"),
]


def test_right_code_passes_tests_of_every_form():
    for answer, verdict in zip(PASSES, judged(*PASSES), strict=True):
        assert verdict == Verdict(1.0, {"tests_passed": 1.0}), (answer, verdict)


def test_wrong_code_scores_0_with_the_reason():
    verdicts = judged(*(answer[:3] for answer in FAILS))
    for (code, _, _, reason), verdict in zip(FAILS, verdicts, strict=True):
        assert isinstance(verdict, Verdict), (code, verdict)
        assert verdict.score == 0.0
        assert reason in verdict.text, (code, verdict)


def test_tests_that_cannot_be_run_are_no_verdict_on_the_code():
    answers = judged(*(answer[:3] for answer in NO_VERDICT), breaker_failures=100)
    for (_, tests, _, reason), answer in zip(NO_VERDICT, answers, strict=True):
        assert isinstance(answer, Unjudged), (tests, answer)
        assert reason in answer.reason, (tests, answer)


def test_a_share_of_the_tests_is_a_score_where_that_is_asked_for():
    programs = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "x", "4"]}
    asserts = ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]
    verdicts = judged(("print(input())", programs, {}), (ADD, asserts, {}), score="share")
    assert [verdict.score for verdict in verdicts] == [0.75, 0.5]
    assert verdicts[0].text == "test 3 of 4: it printed '3\\n', and not 'x'"


def test_time_for_all_tests_is_bounded():
    tests = {"inputs": [""] * 100, "outputs": [""] * 100}
    (verdict,) = judged(("import time\ntime.sleep(0.5)", tests, {}), tests_timeout_s=1.0, timeout_s=30.0)
    assert verdict.score == 0.0
    assert "the time for all tests was used up" in verdict.text


def test_modules_of_other_directories_can_be_imported(tmp_path):
    directory = tmp_path / "modules"
    directory.mkdir()
    (directory / "given_module.py").write_text("value = 42\n")
    for parent in (directory, *directory.parents):
        if parent.stat().st_mode & 0o077 == 0:
            parent.chmod(0o755)

    async def run():
        judger = CodeJudgerConfig(sandbox=SandboxConfig(paths=[directory])).build()
        try:
            rollout = new_rollout("Write it.", ground_truth={"inputs": [""], "outputs": ["42"]})
            rollout.response_text = "import given_module\nprint(given_module.value)"
            return await judger.judge(rollout)
        finally:
            await judger.close()

    assert asyncio.run(run()).score == 1.0


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```\na\n```\nthen\n```py\nb\n```\nand\n```bash\nc\n```", "b\n"),
        ("```python3\nprint(1)", "print(1)"),
        ("text only", "text only"),
        ("``` python extra\na\n``````\nb\n", "b\n"),
        ("````py\na\n````", "a\n"),
        ("```python\na```", "a"),
        ("```python\n```", ""),
        ("```python no line", "```python no line"),
        ("```py\na\n```\n```py", "a\n"),
        # Repeated on and on: with a search that goes back it would take minutes.
        ("`" * 1_000_000, "`" * 1_000_000),
        ("```" + "a" * 1_000_000, "```" + "a" * 1_000_000),
        ("```" + " " * 1_000_000, "```" + " " * 1_000_000),
    ],
    ids=range(14),
)
def test_the_last_block_of_python_is_the_code(response, code):
    assert code_in(response) == code


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("3\n", "3", True),
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("0.333333334", "0.333333333", True),
        ("0.34", "0.33", False),
        ("3.0", "3", False),
        ("3", "3.0", True),
        ("yes", "Yes", False),
        ("", "", True),
        ("nan", "1.0", False),
    ],
)
def test_outputs_are_compared_line_by_line(printed, wanted, same):
    assert same_output(printed, wanted) is same


@pytest.mark.parametrize(
    ("value", "wanted", "same"),
    [
        (3, 3, True),
        ((1, [2, (3,)]), [1, [2, [3]]], True),
        ({1: 2}, {"1": 2}, True),
        (0.1 + 0.2, 0.3, True),
        (True, 1, False),
        ("3", 3, False),
        (None, None, True),
        ([1], [1, 2], False),
        (float("nan"), 0.0, False),
        ([0.5, "a"], [0.5, "b"], False),
    ],
)
def test_values_are_compared_with_what_json_can_say(value, wanted, same):
    assert same_value(value, wanted) is same


@pytest.mark.parametrize("truth", [None, 3, "", [], {}, {"inputs": []}, {"inputs": [1], "outputs": []}, [3], [{}]])
def test_what_is_no_tests_is_refused(truth):
    with pytest.raises(NoTests):
        read_tests(truth, {})


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


@given(plain)
def test_plain_data_comes_over_as_it_is(value):
    assert wire.unpack(wire.loads(wire.dumps(wire.pack(value)))) == value


anything = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*"ltsdbchixqm"]), inner, max_size=2),
    max_leaves=6,
)


@given(anything)
def test_whatever_the_other_side_sends_becomes_plain_data_or_is_refused(said):
    with contextlib.suppress(ValueError):
        wire.unpack(said)


def test_names_that_tests_need_of_the_code():
    needed, dotted = needed_names(
        "import os\nfrom math import isclose\ndef check(f):\n    return f(helper(1))\n"
        "x = add(1, 2)\nassert isclose(x, abs(3)) and math.floor(y.z) and [i for i in range(3)]"
    )
    assert needed == {"add", "helper", "math", "y"}
    assert dotted == {"math", "y"}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_system_calls_has_whole_steps(machine):
    short = seccomp_filter(machine, network_too=False, own_signals_only=False, pid=1)
    full = seccomp_filter(machine, network_too=True, own_signals_only=True, pid=1)
    fullest = seccomp_filter(machine, network_too=True, own_signals_only=True, files_too=True, pid=1)
    assert len(short) % 8 == len(full) % 8 == len(fullest) % 8 == 0
    assert 50 < len(short) // 8 < len(full) // 8 < len(fullest) // 8 < 4096
