"""Thousands of calls of every kind of judge at once, half of them bad: none is lost, and no score is invented."""

import asyncio
import collections
import contextlib
import gc
import os
from pathlib import Path

import pytest

from penstock.judger import (
    CodeJudgerConfig,
    ComposedJudgerConfig,
    HTTPJudgerConfig,
    JudgerSet,
    LLMJudgerConfig,
    NativeJudgerConfig,
    PairwiseJudgerConfig,
    RankingJudgerConfig,
    RunEngine,
    SandboxConfig,
)
from penstock.rollout import Unjudged, Verdict, new_rollout
from penstock.testing import CharTokenizer

from .mixed_calls import ObedientEngine, cases, command_for_model, model, service_for_groups
from .services import Service

IN_FLIGHT = 32
MAX_GROWTH = 32 << 20
FUNCTIONS = Path(__file__).with_name("reward_functions.py")


def configs(service, groups, models, timeout_s):
    def function(name, **fields):
        return NativeJudgerConfig(reward_handler=f"{FUNCTIONS}:{name}", **(common | fields))

    common = {"max_retries": 0, "timeout_s": timeout_s, "breaker_failures": 200, "num_workers": 4}
    http = {"max_retries": 1, "retry_backoff_s": 0.005, "timeout_s": timeout_s, "breaker_failures": 200}
    model = http | {"base_url": f"{models}/v1", "model": "m"}
    at_once = function("obeys_on_the_loop")
    by_service = HTTPJudgerConfig(url=service, **http)
    return {
        "function": function("obeys"),
        "async function": at_once,
        "service": by_service,
        "model": LLMJudgerConfig(template="{response}", **model),
        "engine": LLMJudgerConfig(template="<<{response}>>", max_retries=0, breaker_failures=200),
        "merged": ComposedJudgerConfig(
            all_of={"function": at_once, "service": by_service}, merge=f"{FUNCTIONS}:merges_or_not"
        ),
        "branches": ComposedJudgerConfig(branches={"here": at_once, "there": by_service}),
        "function for groups": function("obeys_for_a_group", per_group=True),
        "service for groups": HTTPJudgerConfig(url=groups, per_group=True, **http),
        "pairs": PairwiseJudgerConfig(template="{first}\n{second}", **model),
        "ranking": RankingJudgerConfig(template="{answers}", **model),
        "code": CodeJudgerConfig(
            sandbox=SandboxConfig(warm=2, max_running=2), test_timeout_s=0.3, max_retries=0, breaker_failures=200
        ),
    }


def rollouts_of(case):
    sources = {"branches": "there" if case.texts[0].endswith(("1", "3", "5", "7", "9")) else "here"}
    source = "nowhere" if case.texts == ("no branch",) else sources.get(case.kind, "")
    made = [new_rollout("question", ground_truth=case.label, data_source=source) for _ in case.texts]
    for rollout, text in zip(made, case.texts, strict=True):
        rollout.response_text = text
    return made


def is_right(answer, expected):
    if isinstance(expected, str):
        return isinstance(answer, Unjudged) and all(part in answer.reason for part in expected.split(" ... "))
    return isinstance(answer, Verdict) and answer.score == expected


def memory():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def judge_all(judgers, every):
    """One answer per rollout of each case, in order; and how much memory the last three quarters of them took."""
    turns = asyncio.Semaphore(IN_FLIGHT)
    answers = [None] * len(every)
    done, grown = 0, 0

    async def one(index, case):
        nonlocal done, grown
        async with turns:
            judger, rollouts = judgers[case.kind], rollouts_of(case)
            if judger.relative:
                answers[index] = await judger.judge_group(rollouts)
            else:
                answers[index] = [await judger.judge(rollout) for rollout in rollouts]
        done += 1
        if done == len(every) // 4:
            grown -= memory()

    async with asyncio.TaskGroup() as calls:
        for index, case in enumerate(every):
            calls.create_task(one(index, case))
    return answers, grown + memory()


@pytest.mark.sized
def test_of_mixed_calls_none_is_lost_and_no_score_is_invented(full_size):
    check_mixed_calls(cases(2_000 if full_size else 150, hanging=full_size), timeout_s=10.0 if full_size else 60.0)


@pytest.mark.soak_tier
@pytest.mark.timeout(900)
def test_of_ten_thousand_mixed_calls_none_is_lost_and_no_score_is_invented():
    check_mixed_calls(cases(10_000, hanging=True), timeout_s=10.0)


def check_mixed_calls(every, timeout_s):
    tokenizer, engine = CharTokenizer(), RunEngine()
    engine.bind(ObedientEngine(tokenizer))

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            service = await stack.enter_async_context(Service())
            first = lambda asked: asked["responses"][0]  # noqa: E731
            groups = await stack.enter_async_context(Service(service_for_groups, first))
            models = await stack.enter_async_context(Service(model, command_for_model))
            judger_set = JudgerSet(ports={"engine": engine, "tokenizer": tokenizer})
            before = descriptors()
            made = configs(service.url, groups.url, models.url.removesuffix("/judge"), timeout_s)
            judgers = {kind: judger_set.get(config) for kind, config in made.items()}
            try:
                answers, grown = await judge_all(judgers, every)
                metrics = {kind: await judger.metrics() for kind, judger in judgers.items()}
            finally:
                await judger_set.close()
            return answers, grown, metrics, descriptors() - before

    answers, grown, metrics, opened = asyncio.run(run())

    wrong = [
        (case, given)
        for case, given in zip(every, answers, strict=True)
        if not all(is_right(answer, expected) for answer, expected in zip(given, case.expected, strict=True))
    ]
    assert wrong == [], f"{len(wrong)} of {len(every)}, the first: {wrong[0]}"
    unjudged = collections.Counter()
    for case, given in zip(every, answers, strict=True):
        unjudged[case.kind] += sum(isinstance(answer, Unjudged) for answer in given)
    for kind in ("function", "model", "engine", "function for groups", "service for groups", "ranking", "code"):
        assert metrics[kind]["unjudged"] == unjudged[kind]
    assert grown < MAX_GROWTH
    # The connections of the three services to their clients end a moment after these.
    assert opened <= 3 * IN_FLIGHT


def test_with_all_workers_hanging_healthy_calls_are_answered_soon_after_the_deadline(rewards, make_config, answered):
    judger = make_config(rewards.obeys, timeout_s=0.5, num_workers=4).build()

    async def run():
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(judger.judge(answered(f"slow {index}")) for index in range(4)))
        started = loop.time()
        hanging = [asyncio.create_task(judger.judge(answered("hang"))) for _ in range(4)]
        await asyncio.sleep(0)
        healthy = await asyncio.gather(*(judger.judge(answered(f"score {index}")) for index in range(40)))
        took = loop.time() - started
        answers = await asyncio.gather(*hanging)
        workers = len(judger.worker_pids)
        await judger.close()
        return healthy, took, answers, workers

    healthy, took, answers, workers = asyncio.run(run())
    assert healthy == [Verdict(float(index)) for index in range(40)]
    assert took < 0.5 + 2.0
    assert answers == [Unjudged("no answer within 0.5 s; the worker was killed")] * 4
    assert workers == 4
