"""Judges of every kind in actors: what they say, and why they say nothing, arrives as if they were here."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest
from unit.judger.mixed_calls import (
    ObedientEngine,
    cases,
    command_for_model,
    configs,
    is_right,
    model,
    rollouts_of,
    service_for_groups,
)
from unit.judger.services import Service

from penstock.cluster.launcher import CPUActorLauncher
from penstock.cluster.placement import RayPlacement
from penstock.judger import JudgerSet, RunEngine
from penstock.testing import CharTokenizer

KINDS = ("service", "model", "engine", "pairs", "code", "merged", "branches")
"""Of the last two, the parts live in actors."""


@contextlib.contextmanager
def services() -> Iterator[list[str]]:
    """A service of scores, one of groups and a language model, on an event loop of their own."""
    made = [Service(), Service(service_for_groups), Service(model, command_for_model)]
    started, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for service in made:
                await stack.enter_async_context(service)
            started.set()
            await ended.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(30)
    try:
        yield [service.url for service in made]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


@pytest.fixture
def judger_set(session):
    engine, tokenizer = RunEngine(), CharTokenizer()
    engine.bind(ObedientEngine(tokenizer))
    return JudgerSet(RayPlacement(CPUActorLauncher(session)), ports={"engine": engine, "tokenizer": tokenizer})


def test_judges_of_every_kind_judge_in_actors_as_they_do_here(judger_set):
    every = [case for case in cases(60, hanging=False) if case.kind in KINDS]
    one = {"num_ray_actors": 1, "num_cpus_per_actor": 0.5, "cpu_memory_per_actor": 200 << 20}
    placed = dict.fromkeys(("model", "engine", "pairs", "code"), one) | {"service": one | {"num_ray_actors": 2}}

    with services() as (scores, groups, models):
        made = configs(scores, groups, models.removesuffix("/judge"), 60.0, placed)
        judgers = {kind: judger_set.get(made[kind]) for kind in KINDS}

        async def judge(case):
            return await judgers[case.kind].judge_group(rollouts_of(case))

        async def run():
            try:
                answers = await asyncio.gather(*map(judge, every))
                return answers, {kind: await judger.metrics() for kind, judger in judgers.items()}
            finally:
                await judger_set.close()

        answers, metrics = asyncio.run(run())
    assert judgers["pairs"].relative and not judgers["service"].relative
    wrong = [
        (case, given)
        for case, given in zip(every, answers, strict=True)
        if not all(is_right(answer, expected) for answer, expected in zip(given, case.expected, strict=True))
    ]
    assert wrong == [], f"{len(wrong)} of {len(every)}, the first: {wrong[0]}"
    # Both actors of the service were asked, for it and for what is merged from it.
    assert metrics["service"]["calls"] >= 20
    assert metrics["engine"]["calls"] == sum(case.kind == "engine" for case in every)
