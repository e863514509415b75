"""Reward functions that come with Penstock: `function(response, label, extra_info) -> number or dict with score`.

A wrong answer scores 0. A row that cannot be judged (no number in its ground truth, say) raises, which makes the
rollout Unjudged: the row is at fault then, not the answer.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from penstock.rollout import Verdict

Function = TypeVar("Function", bound=Callable[..., Any])


def needs(module: str, *, extra: str) -> Callable[[Function], Function]:
    """Marks a function that needs an optional package; a configuration that uses it without is refused."""

    def mark(function: Function) -> Function:
        function.penstock_needs = ((module, extra),)  # type: ignore[attr-defined]
        return function

    return mark


def exact_match(response: str, label: Any, extra_info: Mapping[str, Any]) -> float:
    """1 when the answer is the ground truth, white space around both aside."""
    return float(response.strip() == _text(label).strip())


def matching_characters(response: str, label: Any, extra_info: Mapping[str, Any]) -> float:
    """The share of positions that are right; 1 when equal. A longer or shorter answer loses the difference."""
    wanted = _text(label)
    length = max(len(response), len(wanted))
    if length == 0:
        return 1.0
    return sum(a == b for a, b in zip(response, wanted, strict=False)) / length


_NUMBER = re.compile(
    r"""(?:(?<![\w.)])[-\u2212])?               # a sign, unless it stands between two terms
        \$?
        (?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?       # digits, perhaps in groups of three
        (?:(?<=\d)|(?=\.\d))
        (?:\.\d+)?""",
    re.VERBOSE,
)


def final_number(response: str, label: Any, extra_info: Mapping[str, Any]) -> float:
    """1 when the last number of the answer is the ground truth's: what follows `####` there, or its last number."""
    wanted = _last_number(_text(label).rpartition("####")[2])
    if wanted is None:
        raise ValueError(f"the ground truth {_text(label)[:80]!r} has no number")
    return float(_last_number(response) == wanted)


def _last_number(text: str) -> Decimal | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match.group() or last
    if last is None:
        return None
    return Decimal(last.replace(",", "").replace("$", "").replace("\u2212", "-"))


_ANSWER = re.compile(r"answer\s*:[ \t]*([^\n]+)", re.IGNORECASE)
ANSWER_REACH = 300
"""Characters at the end of a response in which DAPO looks for its answer."""


def dapo_math(response: str, label: Any, extra_info: Mapping[str, Any]) -> dict[str, float]:
    """DAPO's mathematics: 1 when what stands after the last `Answer:` is the ground truth, else -1; `acc` is 1 or 0.

    Numbers are compared as numbers, anything else without dollar signs, boxes and white space.
    """
    wanted = _bare(_text(label))
    if wanted == "":
        raise ValueError("the ground truth is empty")
    found = _ANSWER.findall(response[-ANSWER_REACH:])
    right = bool(found) and _bare(found[-1]) == wanted
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


def _bare(text: str) -> str | Decimal:
    """An answer without what is only notation; a number as a number."""
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text.strip().strip("*"))
    text = re.sub(r"[$\s]|\\[,;!]", "", text.rpartition("=")[2]).rstrip(".").replace("\u2212", "-")
    number = text.replace(",", "")
    if re.fullmatch(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)", number):
        return Decimal(number)
    return text


@needs("math_verify", extra="math")
def math_equal(response: str, label: Any, extra_info: Mapping[str, Any]) -> float:
    """1 when the answer is mathematically equal to the ground truth, as math-verify sees it."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about what the next comment explains
    truth = _text(label)
    # math-verify's own deadlines are off: they turn a slow comparison into a wrong answer. The worker's deadline holds.
    gold = parse(truth if "$" in truth or "\\boxed" in truth else f"\\boxed{{{truth}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the ground truth {truth[:80]!r} cannot be read as mathematics")
    answer = parse(response, parsing_timeout=None)
    return float(bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True)))


@needs("reasoning_gym", extra="gym")
def reasoning_gym_score(response: str, label: Any, extra_info: Mapping[str, Any]) -> float:
    """The score of the reasoning-gym dataset `extra_info["gym"]` for its entry `extra_info["entry"]`.

    Some scorers read their dataset's settings, so it is made with `extra_info["params"]`. The answer is what
    stands in the last <answer> tag, or the whole response without one. Where the installed reasoning-gym has
    `cascade_score`, an answer that its scorer does not take is looked at again without LaTeX, as a number and as
    mathematics; a score only ever rises by that.
    """
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(response)
    answer = (response if answer is None else answer).strip()
    entry = extra_info["entry"]
    dataset = _gym_dataset(extra_info["gym"], json.dumps(extra_info.get("params", {}), sort_keys=True))
    # First, and by itself: the cascade takes a scorer that raises for a wrong answer.
    score = float(dataset.score_answer(answer, entry))
    cascade = _cascade_score()
    if cascade is None or score >= 1.0 or not isinstance(entry.get("answer"), str):
        return score
    return max(score, float(cascade(answer, entry["answer"], dataset=dataset, entry=entry)))


@functools.cache
def _cascade_score() -> Callable[..., float] | None:
    """Of reasoning-gym, from the release after 0.1.25 on."""
    try:
        from reasoning_gym.scoring import cascade_score
    except ImportError:
        return None
    found: Callable[..., float] = cascade_score
    return found


@functools.cache
def _gym_dataset(name: str, params: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **{"size": 1, "seed": 0} | json.loads(params))


def weighted_sum(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> dict[str, float]:
    """A merge function: the weighted sum of the scores; the scores become the parts."""
    scores = {name: verdict.score for name, verdict in verdicts.items()}
    return {**scores, "score": sum(weights[name] * score for name, score in scores.items())}


def _text(label: Any) -> str:
    if label is None:
        raise ValueError("the row has no ground truth")
    return label if isinstance(label, str) else str(label)
