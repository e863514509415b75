"""The tests of a row, in the forms that datasets have them, and whether what came out is what was wanted.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                       programs: standard input, standard output
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}           calls of a function, or a method of `Solution`
    [{"input": "1 2\\n", "output": "3\\n"}, ...]                      programs, case by case
    ["assert add(1, 2) == 3", ...]                                   Python
    {"test_list": [...], "test_setup_code": "..."}                   Python, with what comes before
    {"test": "def check(candidate): ...", "entry_point": "add"}      Python that is given the function
    "assert add(1, 2) == 3"                                          Python, as one text

Each also as JSON text. `entry_point` may stand in the row's extra information; it limits what tests find of the code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

MAX_TESTS = 1000
_FENCE = "```"
_LANGUAGE = re.compile(r"[ \t]*([A-Za-z0-9_+-]*)")
_PYTHON = ("", "python", "python3", "py")


class NoTests(Exception):
    """The row has no tests that can be read; it is at fault, and not the answer."""


class ProgramTests(msgspec.Struct, frozen=True):
    inputs: list[str]
    outputs: list[str]


class CallTests(msgspec.Struct, frozen=True):
    function: str
    inputs: list[list[Any]]
    outputs: list[Any]


class PythonTests(msgspec.Struct, frozen=True):
    tests: list[str]
    setup: str = ""
    subjects: list[str] = []
    """What tests find of the code; empty: whatever they name."""


Tests = ProgramTests | CallTests | PythonTests


def read_tests(truth: Any, extra_info: Mapping[str, Any]) -> Tests:
    """Raises NoTests."""
    if isinstance(truth, str):
        truth = _parsed(truth)
    try:
        found = _tests(truth, extra_info)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise NoTests(f"the tests cannot be read: {type(error).__name__}: {error}") from None
    number = len(found.tests) if isinstance(found, PythonTests) else len(found.inputs)
    if not number:
        raise NoTests("the ground truth has no test")
    if number > MAX_TESTS:
        raise NoTests(f"the ground truth has {number} tests; at most {MAX_TESTS} are run")
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _tests(truth: Any, extra_info: Mapping[str, Any]) -> Tests:
    entry_point = str(extra_info.get("entry_point") or "")
    if isinstance(truth, str) and truth.strip():
        return PythonTests([truth], "", [entry_point] if entry_point else [])
    if isinstance(truth, Sequence) and not isinstance(truth, str | bytes):
        if all(isinstance(one, str) for one in truth):
            return PythonTests([str(one) for one in truth], "", [entry_point] if entry_point else [])
        return _cases([dict(one) for one in truth], str(extra_info.get("fn_name") or extra_info.get("func_name") or ""))
    if not isinstance(truth, Mapping):
        raise NoTests(f"the ground truth is a {type(truth).__name__}; it must hold tests")
    entry_point = str(truth.get("entry_point") or entry_point)
    if "inputs" in truth and "outputs" in truth:
        return _pairs(list(truth["inputs"]), list(truth["outputs"]), str(truth.get("fn_name") or ""))
    setup = "\n".join([*map(str, truth.get("test_imports") or ()), str(truth.get("test_setup_code") or "")])
    subjects = [entry_point] if entry_point else []
    if "test_list" in truth:
        return PythonTests([str(one) for one in truth["test_list"]], setup, subjects)
    if "test" in truth:
        source = str(truth["test"])
        if entry_point and re.search(r"^def check\(", source, re.MULTILINE):
            source += f"\ncheck({entry_point})\n"
        return PythonTests([source], setup, subjects)
    known = "inputs and outputs, test_list, or test"
    raise NoTests(f"the ground truth has {sorted(map(str, truth))[:8]}; it must have {known}")


def _pairs(inputs: list[Any], outputs: list[Any], function: str) -> Tests:
    if len(inputs) != len(outputs):
        raise NoTests(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    if not function:
        return ProgramTests([_text(one) for one in inputs], [_text(one) for one in outputs])
    if all(isinstance(one, list) and len(one) == 1 for one in outputs):
        # Some datasets write every value in a list of its own.
        outputs = [one[0] for one in outputs]
    return CallTests(function, [list(one) for one in inputs], outputs)


def _cases(cases: list[dict[str, Any]], function: str) -> Tests:
    """One mapping per test, as competitive-programming sets have them."""
    if any(str(case.get("testtype") or case.get("type") or "") == "functional" for case in cases):
        name = function or str((cases[0].get("metadata") or {}).get("func_name") or cases[0].get("fn_name") or "")
        if not name:
            raise NoTests("the tests call a function, and nothing says which")
        arguments = [[json.loads(line) for line in str(case["input"]).splitlines() if line] for case in cases]
        return CallTests(name, arguments, [_parsed(str(case["output"])) for case in cases])
    return _pairs([case["input"] for case in cases], [case["output"] for case in cases], "")


def _text(value: Any) -> str:
    """Some datasets write a text as the list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def code_in(response: str) -> str:
    """The last block of Python in an answer, or all of it when it has none."""
    last = response
    for language, code in _blocks(response):
        if language.lower() in _PYTHON:
            last = code
    return last


def _blocks(response: str) -> Iterator[tuple[str, str]]:
    """Language and text of each; the last may lack its end. Takes a time that grows with the text and no faster: models
    repeat themselves, and this runs on the event loop."""
    end = -len(_FENCE)
    while (begin := response.find(_FENCE, end + len(_FENCE))) >= 0:
        line_end = response.find("\n", begin)
        if line_end < 0:
            return
        named = _LANGUAGE.match(response, begin + len(_FENCE))
        end = response.find(_FENCE, line_end + 1)
        yield named[1] if named else "", response[line_end + 1 : end if end >= 0 else None]
        if end < 0:
            return


def same_output(printed: str, wanted: str) -> bool:
    """Line by line without the white space at their ends; numbers with a point may differ by rounding."""
    ours, theirs = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, wanted))
    if ours == theirs:
        return True
    mine, right = printed.split(), wanted.split()
    return len(ours) == len(theirs) and len(mine) == len(right) and all(map(_same_word, mine, right))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if not re.fullmatch(r"[-+]?\d*\.\d+(?:[eE][-+]?\d+)?", wanted):
        return False
    try:
        return math.isclose(float(word), float(wanted), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def same_value(value: Any, wanted: Any) -> bool:
    """What a call returned against what JSON says it must be: tuples are lists there, and keys are texts."""
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, float) or isinstance(wanted, float):
        numbers = isinstance(value, int | float) and isinstance(wanted, int | float)
        return numbers and math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(same_value, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        mine = {str(key): item for key, item in value.items()}
        right = {str(key): item for key, item in wanted.items()}
        return mine.keys() == right.keys() and all(same_value(mine[key], right[key]) for key in mine)
    return type(value) is type(wanted) and bool(value == wanted)
