"""Calls of every kind of judge, good and bad, each with the one answer that is right for it.

A good call has a score that no other call has: a score that was invented, swapped or kept from before is seen.
"""

import dataclasses
import itertools
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from penstock.errors import DataFailure, InfrastructureFailure
from penstock.judger import (
    CodeJudgerConfig,
    ComposedJudgerConfig,
    HTTPJudgerConfig,
    JudgerConfig,
    LLMJudgerConfig,
    NativeJudgerConfig,
    PairwiseJudgerConfig,
    RankingJudgerConfig,
    SandboxConfig,
)
from penstock.ports import Completion
from penstock.rollout import (
    FinishReason,
    RolloutState,
    Unjudged,
    Verdict,
    new_rollout,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)

from .services import chat, scored

GROUP = 3
FUNCTIONS = Path(__file__).with_name("reward_functions.py")
Expected = float | str
"""A score, or what the reason says; " ... " stands between its parts."""


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    texts: tuple[str, ...]
    """One, or those of a group."""
    expected: tuple[Expected, ...]
    label: object = None


FUNCTION_FAULTS = {
    "raise": "raised ValueError: no such thing",
    "sys.exit": "raised SystemExit",
    "nan": "returned nan",
    "inf": "returned -inf",
    "string": "a score must be a number",
    "none": "a score must be a number",
    "missing": "without 'score'",
    "list": "a score must be a number",
}
SERVICE_FAULTS = {
    "nan": "no JSON",
    "inf": "no JSON",
    "string": "a score must be a number",
    "null": "a score must be a number",
    "missing": "without 'score'",
    "wrong json": "no JSON",
    "empty": "no JSON",
    "deep": "no JSON",
    "redirect": "none is followed",
    "gzip": "answered in 'gzip'",
    "500": "answered 500: sorry",
    "503": "answered 503: sorry",
    "404": "answered 404: sorry",
    "crash": "no answer from http://127.0.0.1",
    "half": "no answer from http://127.0.0.1",
}
MODEL_FAULTS = {
    "nan": "nothing that fits",
    "string": "nothing that fits",
    "two": "which do not agree",
    "out of range": "a score is from",
    "cut off": "the judge was cut off",
    "no choice": "with 0 choices",
    "no chat": "no chat completion",
    "wrong json": "no chat completion",
    "redirect": "none is followed",
    "500": "answered 500",
    "404": "answered 404",
    "crash": "no answer from http://127.0.0.1",
    "half": "no answer from http://127.0.0.1",
}
ENGINE_FAULTS = {
    "dies": "the engine failed: it died",
    "refuses": "refused the judge's prompt",
    "drops": "dropped the judge's request",
    "cut off": "the judge was cut off",
    "string": "nothing that fits",
    "two": "which do not agree",
}
# What costs a process, a deadline or 100 MB each time is rarer.
RARE = {
    "function": {
        "hang": "no answer within",
        "exit": "worker died: exit status 3",
        "segfault": "worker died: killed by",
        "100 MB": "a score must be a number",
    },
    "async function": {"hang": "no answer within"},
    "service": {"hang": "no answer within", "huge": "more than max_answer_bytes"},
    "model": {"hang": "no answer within", "huge": "more than max_answer_bytes"},
    "code": {"hang": 0.0, "huge": 0.0, "memory": 0.0},
}
COMMON = {
    "function": FUNCTION_FAULTS,
    "async function": FUNCTION_FAULTS,
    "service": SERVICE_FAULTS,
    "model": MODEL_FAULTS,
    "engine": ENGINE_FAULTS,
    "merged": {
        **{fault: f"function: ... {reason}" for fault, reason in FUNCTION_FAULTS.items()},
        **{fault: f"service: ... {SERVICE_FAULTS[fault]}" for fault in ("404", "500", "redirect", "half")},
        "score 1001": "merge: returned 'text'",
        "score 1002": "merge: returned nan",
        "score 1003": "merge: returned None",
    },
    "branches": {"no branch": "no branch for data_source"},
    "code": {
        "wrong": 0.0,
        "crash": 0.0,
        "nan": 0.0,
        "string": 0.0,
        "exits": 0.0,
        "no tests": "tests",
    },
}
CODE = {
    "wrong": "print('no')",
    "crash": "import os\nos.kill(os.getpid(), 11)",
    "nan": "print(float('nan'))",
    "string": "print('1.0')",
    "exits": "import os\nos._exit(0)",
    "hang": "while True: pass",
    "huge": "while True: print('x' * 65536)",
    "memory": "x = bytearray(1 << 32)",
    "no tests": "print(1)",
}
SHARES = {
    "function": 0.22,
    "async function": 0.2,
    "service": 0.2,
    "model": 0.13,
    "engine": 0.1,
    "merged": 0.04,
    "branches": 0.02,
    "function for groups": 0.02,
    "service for groups": 0.02,
    "pairs": 0.01,
    "ranking": 0.02,
    "code": 0.02,
}
RARE_EVERY = 40
"""Of a kind's faults, one in so many is a rare one."""


def cases(number: int, *, hanging: bool) -> list[Case]:
    """About so many, of every kind, in a random order that is always the same; those that hang only if wanted."""
    scores = (round(0.001 + 0.0001 * index, 4) for index in itertools.count())
    made = [
        case
        for kind, share in SHARES.items()
        for case in _of_kind(kind, max(10, round(number * share)), scores)
        if hanging or case.texts != ("hang",)
    ]
    random.Random(0).shuffle(made)
    return made


def _of_kind(kind: str, number: int, scores: Iterator[float]) -> Iterator[Case]:
    if kind in ("function for groups", "service for groups", "pairs", "ranking"):
        yield from _groups(kind, number, scores)
        return
    common, rare = itertools.cycle(COMMON[kind].items()), itertools.cycle(RARE.get(kind, COMMON[kind]).items())
    for index in range(number):
        if index % 2 == 0:
            score = next(scores)
            if kind == "code":
                yield Case(kind, (f"print({score})",), (1.0,), {"inputs": [""], "outputs": [str(score)]})
                continue
            way = "score"
            if kind in ("function", "async function") and index % 8 == 0:
                way = "slow"
            if kind == "service" and index % 8 == 0:
                way = "once score"
            yield Case(kind, (f"{way} {score}",), (score,))
            continue
        fault, expected = next(rare if index % (2 * RARE_EVERY) == 1 else common)
        if kind == "code":
            label = None if fault == "no tests" else {"inputs": [""], "outputs": ["well"]}
            yield Case(kind, (CODE[fault],), (expected,), label)
        else:
            yield Case(kind, (fault,), (expected,))


def _groups(kind: str, number: int, scores: Iterator[float]) -> Iterator[Case]:
    """Whole ones and, in turn, ones of which one answer has no score or the call fails for all."""
    for index in range(number):
        values = [next(scores) for _ in range(GROUP)]
        texts = [f"score {value}" for value in values]
        bad = index % 3
        if kind == "function for groups":
            if bad == 1:
                yield Case(kind, (texts[0], "nan", texts[2]), (values[0], "returned nan", values[2]))
            elif bad == 2:
                fault, reason = (("short", "1 scores for 3 answers"), ("raise", "no such thing"))[index // 3 % 2]
                yield Case(kind, (texts[0], fault, texts[2]), (reason,) * GROUP)
            else:
                yield Case(kind, tuple(texts), tuple(values))
        elif kind == "service for groups":
            if bad == 1:
                yield Case(kind, (texts[0], "null", texts[2]), (values[0], "returned None", values[2]))
            elif bad == 2:
                fault = ("500", "half", "crash", "wrong json")[index // 3 % 4]
                yield Case(kind, (fault, *texts[1:]), (SERVICE_FAULTS[fault],) * GROUP)
            else:
                yield Case(kind, tuple(texts), tuple(values))
        elif bad == 2:
            fault = ("string", "500", "no chat", "half")[index // 3 % 4]
            yield Case(kind, (fault, *texts[1:]), (MODEL_FAULTS[fault],) * GROUP)
        else:
            random.Random(index).shuffle(texts)
            ranks = sorted(texts, key=_value)
            yield Case(kind, tuple(texts), tuple(ranks.index(text) / (GROUP - 1) for text in texts))


def _value(text: str) -> float:
    return float(text.removeprefix("score "))


# Who judges them.


def configs(
    service: str, groups: str, models: str, timeout_s: float, placed: Mapping[str, dict] = MappingProxyType({})
) -> dict[str, JudgerConfig]:
    """A judge of each kind, which asks at these addresses. `placed` has fields that say where a kind lives."""

    def function(name, **fields):
        return NativeJudgerConfig(reward_handler=f"{FUNCTIONS}:{name}", **(common | fields))

    common = {"max_retries": 0, "timeout_s": timeout_s, "breaker_failures": 200, "num_workers": 4}
    http = {"max_retries": 1, "retry_backoff_s": 0.005, "timeout_s": timeout_s, "breaker_failures": 200}
    model = http | {"base_url": f"{models}/v1", "model": "m"}
    at_once = function("obeys_on_the_loop")
    by_service = HTTPJudgerConfig(url=service, **http, **placed.get("service", {}))
    return {
        "function": function("obeys"),
        "async function": at_once,
        "service": by_service,
        "model": LLMJudgerConfig(template="{response}", **model, **placed.get("model", {})),
        "engine": LLMJudgerConfig(
            template="<<{response}>>", max_retries=0, breaker_failures=200, **placed.get("engine", {})
        ),
        "merged": ComposedJudgerConfig(
            all_of={"function": at_once, "service": by_service}, merge=f"{FUNCTIONS}:merges_or_not"
        ),
        "branches": ComposedJudgerConfig(branches={"here": at_once, "there": by_service}),
        "function for groups": function("obeys_for_a_group", per_group=True),
        "service for groups": HTTPJudgerConfig(url=groups, per_group=True, **http),
        "pairs": PairwiseJudgerConfig(template="{first}\n{second}", **model, **placed.get("pairs", {})),
        "ranking": RankingJudgerConfig(template="{answers}", **model),
        "code": CodeJudgerConfig(
            sandbox=SandboxConfig(warm=2, max_running=2),
            test_timeout_s=0.3,
            max_retries=0,
            breaker_failures=200,
            **placed.get("code", {}),
        ),
    }


def rollouts_of(case: Case) -> list[RolloutState]:
    sources = {"branches": "there" if case.texts[0].endswith(("1", "3", "5", "7", "9")) else "here"}
    source = "nowhere" if case.texts == ("no branch",) else sources.get(case.kind, "")
    made = [new_rollout("question", ground_truth=case.label, data_source=source) for _ in case.texts]
    for rollout, text in zip(made, case.texts, strict=True):
        rollout.response_text = text
    return made


def is_right(answer: Verdict | Unjudged, expected: Expected) -> bool:
    if isinstance(expected, str):
        return isinstance(answer, Unjudged) and all(part in answer.reason for part in expected.split(" ... "))
    return isinstance(answer, Verdict) and answer.score == expected


# What answers on the other side.


def service_for_groups(asked: dict) -> tuple[int, bytes, dict]:
    first, *_ = asked["responses"]
    if not first.startswith("score "):
        return scored(first)
    said = [scored(text)[1].decode() for text in asked["responses"]]
    return 200, f"[{', '.join(said)}]".encode(), {}


def model(asked: dict) -> tuple[int, bytes, dict]:
    """A language model behind an endpoint. Its question is the answer itself, or those of a group, one per line."""
    lines, fault = _asked(asked), command_for_model(asked)
    if not fault:
        return 200, chat(f"I think: {_rating([_value(line) for line in lines])}"), {}
    if fault in ("string", "nan", "two", "out of range", "cut off"):
        return 200, chat(*_unreadable(fault)), {}
    if fault == "no choice":
        return 200, b'{"choices": []}', {}
    if fault == "no chat":
        return 200, b'{"score": 1.0}', {}
    return scored(fault)


def _rating(values: list[float]) -> str:
    if len(values) == 1:
        return f"[[{values[0]}]]"
    if len(values) == 2:
        return "[[A]]" if values[0] > values[1] else "[[B]]"
    order = sorted(range(len(values)), key=lambda index: -values[index])
    return f"[[{', '.join(str(index + 1) for index in order)}]]"


def _unreadable(fault: str) -> tuple[str, str]:
    said = {"string": "[[high]]", "nan": "[[nan]]", "two": "[[1]] or [[2]]", "out of range": "[[11]]"}
    return said.get(fault, "[[5]]"), "length" if fault == "cut off" else "stop"


def command_for_model(asked: dict) -> str:
    return next((line for line in _asked(asked) if not line.startswith("score ")), "")


def _asked(asked: dict) -> list[str]:
    lines = asked["messages"][-1]["content"].splitlines()
    return [line for line in lines if line and not line.startswith("[Answer ")]


class ObedientEngine:
    """An engine of the run: it writes what the judge's prompt says."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer

    async def generate(self, request) -> Completion:
        prompt = self._tokenizer.decode(unpack_ids(request.prompt_ids).tolist())
        command = re.search(r"<<(.*?)>>", prompt).group(1)
        if command == "dies":
            raise InfrastructureFailure("it died")
        if command == "refuses":
            raise DataFailure("too long")
        finish = {"drops": FinishReason.ABORT, "cut off": FinishReason.LENGTH}.get(command, FinishReason.STOP)
        said = _rating([_value(command)]) if command.startswith("score ") else _unreadable(command)[0]
        ids = self._tokenizer.encode(said)
        return Completion(
            ids=pack_ids(ids), logprobs=pack_logprobs([0.0] * len(ids)), finish_reason=finish, steps=((0, len(ids)),)
        )
