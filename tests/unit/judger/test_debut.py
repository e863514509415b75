"""A judge that cannot work is found before a model is loaded, or stops the run with its first rollouts."""

import asyncio
import itertools
from pathlib import Path

import pytest

from penstock.errors import ConfigError, UserFunctionError
from penstock.judger import ComposedJudgerConfig, check_judgers, exact_match, try_judger
from penstock.rollout import Prompt, Verdict

from . import wrong_functions as wrong

FILE = Path(wrong.__file__)
PROMPTS = [Prompt(ground_truth=str(n), data_source="sums", extra_info={"n": n}) for n in range(10)]


def line_of(text):
    return next(number for number, line in enumerate(FILE.read_text().splitlines(), start=1) if text in line)


def judge_until_stopped(config, make_rollout):
    """How many rollouts were judged before the run was stopped, and why it was."""
    judger = config.build()

    async def run():
        try:
            for number in itertools.count(1):
                try:
                    await judger.judge(make_rollout())
                except UserFunctionError as error:
                    return number, str(error)
        finally:
            await judger.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def trial(config, prompts=PROMPTS, **options):
    async def run():
        judger = config.build()
        try:
            return await try_judger(judger, prompts, **options), await judger.metrics()
        finally:
            await judger.close()

    return asyncio.run(run())


def test_a_plain_bug_stops_the_run_after_a_few_rollouts_with_name_line_and_traceback(make_config, answered):
    count, said = judge_until_stopped(make_config(wrong.subtracts, max_retries=2), lambda: answered("4", "5"))
    assert count == 8
    assert "wrong_functions.subtracts" in said
    assert f"TypeError at {FILE}:{line_of('response - label')}" in said
    assert "return response - label" in said
    assert "worker.py" not in said


@pytest.mark.parametrize("function", [wrong.needs_a_number, wrong.returns_nothing, wrong.needs_a_match])
def test_a_judge_that_never_gave_a_verdict_and_fails_the_same_way_stops_the_run(make_config, answered, function):
    count, said = judge_until_stopped(make_config(function, breaker_failures=20), lambda: answered("four", 4))
    assert count == 20
    assert function.__name__ in said


def test_a_judge_that_never_gave_a_verdict_may_fail_in_several_ways(make_config, answered):
    answers = itertools.cycle(["four", "", "it is four"])
    config = make_config(wrong.needs_a_number_first, breaker_failures=20)
    count, said = judge_until_stopped(config, lambda: answered(next(answers), 4))
    assert count == 20
    assert "needs_a_number_first gave no verdict for any of the first 20 rollouts, the last time in this one" in said


def test_an_async_judge_with_a_bug_stops_the_run_too(make_config, answered):
    count, said = judge_until_stopped(make_config(wrong.asks_a_service), lambda: answered("a"))
    assert count == 8
    assert f"{FILE}:{line_of('never tried')}" in said


def test_a_judge_that_worked_before_is_given_a_rest(make_config, answered):
    judger = make_config(wrong.needs_a_number, breaker_failures=3, max_wait_s=0.2).build()

    async def run():
        answers = [await judger.judge(answered(text, 4)) for text in ("4", "x", "x", "x", "x")]
        await judger.close()
        return answers

    first, *others = asyncio.run(run())
    assert first == Verdict(1.0)
    assert [answer.reason.partition(":")[0] for answer in others] == ["raised ValueError"] * 3 + ["circuit open"]


def test_failures_of_different_kinds_do_not_add_up(make_config, answered):
    judger = make_config(wrong.works_on_the_label, breaker_failures=1000, timeout_s=0.5).build()

    async def run():
        for _ in range(7):
            await judger.judge(answered("x", "y"))
        await judger.judge(answered("y", "y"))
        for _ in range(20):
            await judger.judge(answered("x", "y"))
        await judger.close()

    asyncio.run(run())


def test_a_merge_function_with_a_bug_stops_the_run(make_config, answered):
    config = ComposedJudgerConfig(all_of={"a": exact_match, "b": exact_match}, merge=wrong.merges_wrongly)
    count, said = judge_until_stopped(config, lambda: answered("4", "4"))
    assert count == 8
    assert "merges_wrongly" in said


def test_the_traceback_is_in_the_detail_of_what_was_not_judged(make_config, answered):
    judger = make_config(wrong.subtracts).build()
    answer = asyncio.run(judger.judge(answered("4", "5")))
    asyncio.run(judger.close())
    assert answer.reason.startswith("raised TypeError: unsupported operand")
    assert f'File "{FILE}", line {line_of("response - label")}, in subtracts' in answer.detail
    assert len(answer.detail) <= 4000


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (wrong.subtracts, "TypeError: unsupported operand"),
        (wrong.misspelt, "NameError: name 'scorre' is not defined"),
        (wrong.reads_a_missing_key, "KeyError: 'difficulty'"),
        (wrong.imports_what_is_not_there, "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_a_plain_bug_is_found_by_trying(make_config, function, reason):
    said, metrics = trial(make_config(function))
    assert reason in said
    assert f"{FILE}:{line_of(f'def {function.__name__}') + 1}" in said or "no_such_package" in said
    assert metrics["calls"] == 0


@pytest.mark.parametrize("function", [exact_match, wrong.needs_a_number, wrong.needs_a_match, wrong.works_on_the_label])
def test_a_judge_that_may_work_passes_without_a_word(make_config, function):
    assert trial(make_config(function))[0] is None


def test_an_async_function_is_not_tried(make_config):
    wrong.CALLS.clear()
    assert trial(make_config(wrong.asks_a_service))[0] is None
    assert wrong.CALLS == []


def test_a_trial_ends_although_the_judge_does_not(make_config):
    assert trial(make_config(wrong.slow), timeout_s=0.5)[0] is None


def test_each_part_of_a_composed_judger_is_tried_on_its_own_prompts():
    words = [Prompt(ground_truth="a", data_source="words")]
    config = ComposedJudgerConfig(branches={"sums": exact_match, "words": wrong.subtracts})
    assert trial(config)[0] is None
    assert "subtracts" in trial(config, [*PROMPTS, *words])[0]
    merged = ComposedJudgerConfig(all_of={"a": exact_match, "b": wrong.subtracts}, merge=wrong.merges_wrongly)
    assert "subtracts" in trial(merged)[0]


def test_every_task_whose_judger_cannot_work_is_named(make_config):
    bad, good = make_config(wrong.subtracts).build(), make_config(exact_match).build()
    with pytest.raises(ConfigError) as caught:
        check_judgers([("a", bad, PROMPTS), ("b", good, PROMPTS), ("c", bad, PROMPTS)])
    asyncio.run(bad.close())
    asyncio.run(good.close())
    (problem,) = caught.value.problems
    assert problem.startswith("task 'a': the judge ")
