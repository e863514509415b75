"""Thousands of calls of every kind of judge at once, half of them bad: none is lost, and no score is invented."""

import asyncio
import collections
import contextlib
import gc
import os
from pathlib import Path

import pytest

from penstock.judger import JudgerSet, RunEngine
from penstock.rollout import Unjudged, Verdict
from penstock.testing import CharTokenizer

from .mixed_calls import (
    ObedientEngine,
    cases,
    command_for_model,
    configs,
    is_right,
    model,
    rollouts_of,
    service_for_groups,
)
from .services import Service

IN_FLIGHT = 32
MAX_GROWTH = 32 << 20


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
def test_of_mixed_calls_none_is_lost_and_no_score_is_invented(size):
    hanging = bool(size(0, 1))
    check_mixed_calls(cases(size(150, 1_000), hanging=hanging), timeout_s=10.0 if hanging else 60.0)


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


def test_with_all_workers_hanging_healthy_calls_are_answered_soon_after_the_deadline(
    rewards, make_config, answered, workers, is_gone
):
    judger = make_config(rewards.obeys, timeout_s=0.5, num_workers=4).build()

    async def run():
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(judger.judge(answered(f"slow {index}")) for index in range(4)))
        first = workers()
        started = loop.time()
        hanging = [asyncio.create_task(judger.judge(answered("hang"))) for _ in range(4)]
        await asyncio.sleep(0)
        healthy = await asyncio.gather(*(judger.judge(answered(f"score {index}")) for index in range(40)))
        took = loop.time() - started
        answers = await asyncio.gather(*hanging)
        killed = [pid for pid in first if is_gone(pid)]
        fresh = workers()
        await judger.close()
        return healthy, took, answers, killed, fresh

    healthy, took, answers, killed, fresh = asyncio.run(run())
    assert healthy == [Verdict(float(index)) for index in range(40)]
    assert took < 0.5 + 2.0
    assert answers == [Unjudged("no answer within 0.5 s; the worker was killed")] * 4
    assert len(killed) == len(fresh) == 4
