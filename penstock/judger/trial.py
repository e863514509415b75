"""A judge is tried on a few prompts before a model is loaded: a plain bug costs seconds then.

Only a function that runs in worker processes is tried, because a call there leaves nothing behind; so a judger that
asks a service is not. What is refused is a bug that no answer can be the cause of: a TypeError, a NameError, a missing
key, for every prompt and every answer that was tried, the right one among them. A judge that raises for nonsense and
would work on a sensible answer passes without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator

from penstock.errors import ConfigError
from penstock.judger.composed import ComposedJudger, MergedJudger
from penstock.judger.failure import CallFailed
from penstock.judger.native import NativeJudger
from penstock.ports import Judger
from penstock.rollout import Prompt, RolloutState

PROMPTS_TRIED = 3
"""Per data source."""
TRIAL_TIMEOUT_S = 30.0


async def try_judger(judger: Judger, prompts: Iterable[Prompt], timeout_s: float = TRIAL_TIMEOUT_S) -> str | None:
    """Why this judger cannot work, with the traceback; None when it gave a verdict, may give one, or was not tried.

    Ends after `timeout_s` at the latest, and says nothing then. The calls count for nothing else.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for function, tried in _functions(judger, _few_per_source(prompts)):
                if (problem := await _try(function, tried)) is not None:
                    return problem
    return None


def check_judgers(judged: Iterable[tuple[str, Judger, Iterable[Prompt]]]) -> None:
    """Try the judger of each task on its prompts; from outside an event loop.

    Raises ConfigError with the traceback of every one that cannot work. A judger that several tasks share is tried
    with the first of them.
    """
    firsts: dict[int, tuple[str, Judger, Iterable[Prompt]]] = {}
    for task, judger, prompts in judged:
        firsts.setdefault(id(judger), (task, judger, prompts))

    async def run() -> list[str]:
        return [
            f"task {task!r}: {problem}"
            for task, judger, prompts in firsts.values()
            if (problem := await try_judger(judger, prompts)) is not None
        ]

    if problems := asyncio.run(run()):
        raise ConfigError(problems)


def _few_per_source(prompts: Iterable[Prompt]) -> list[Prompt]:
    few: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        of_source = few.setdefault(prompt.data_source, [])
        if len(of_source) < PROMPTS_TRIED:
            of_source.append(prompt)
    return [prompt for of_source in few.values() for prompt in of_source]


def _functions(judger: Judger, prompts: list[Prompt]) -> Iterator[tuple[NativeJudger, list[Prompt]]]:
    """The functions a judger is made of that run in workers, each with the prompts it would judge."""
    if isinstance(judger, NativeJudger):
        if judger.in_workers and prompts:
            yield judger, prompts
    elif isinstance(judger, ComposedJudger):
        for source, part in judger.parts.items():
            yield from _functions(part, [prompt for prompt in prompts if prompt.data_source == source])
    elif isinstance(judger, MergedJudger):
        for part in judger.parts.values():
            yield from _functions(part, prompts)


async def _try(judger: NativeJudger, prompts: list[Prompt]) -> str | None:
    last: CallFailed | None = None
    for prompt in prompts:
        for answer in (str(prompt.ground_truth), "", "The answer is 42."):
            rollout = RolloutState(prompt=prompt, response_text=answer)
            try:
                await judger.attempt(rollout)
            except CallFailed as failure:
                if not failure.plain_bug:
                    return None
                last = failure
            else:
                return None
    if last is None:
        return None
    tried = f"{len(prompts)} prompt{'s' * (len(prompts) > 1)}, each with the right answer, an empty one and another"
    return f"the judge {judger.name} fails whatever it is given ({tried}); {last.way}:\n{last.detail}".rstrip()
