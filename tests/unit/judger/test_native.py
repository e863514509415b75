"""NativeJudger: verdicts, every way of not having one, deadlines, retries, breaker, cache."""

import asyncio
import math
import threading

import msgspec
import pytest

from penstock.errors import ConfigError
from penstock.judger import HTTPJudgerConfig, JudgerSet, NativeJudgerConfig
from penstock.judger.calling import InOrder
from penstock.rollout import FinishReason, Turn, Unjudged, Verdict, new_rollout
from penstock.testing import run_virtual


def judge_all(judger, *rollouts):
    async def run():
        try:
            return await asyncio.gather(*(judger.judge(rollout) for rollout in rollouts))
        finally:
            await judger.close()

    return asyncio.run(run())


def test_a_number_becomes_a_verdict(rewards, make_config, answered):
    assert judge_all(make_config(rewards.length).build(), answered("four")) == [Verdict(4.0)]


def test_a_dict_becomes_a_verdict_with_its_numbers_as_parts(rewards, make_config, answered):
    (verdict,) = judge_all(make_config(rewards.rich).build(), answered("a", [1, {"a": "b"}]))
    assert verdict == Verdict(1.0, {"format": 0.5, "label_is": 1.0}, "well done")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("nan", "must be finite"),
        ("inf", "must be finite"),
        ("huge int", "must be finite"),
        ("string", "must be a number"),
        ("none", "must be a number"),
        ("list", "must be a number"),
        ("complex", "must be a number"),
        ("huge string", "must be a number"),
        ("score string", "must be a number"),
        ("missing", "without 'score'"),
        ("huge", "characters"),
        ("part nan", "part 'style'"),
        ("many parts", "returned 101 parts; at most 100"),
        ("unknown", "raised KeyError"),
        ("surrogate", "cannot be sent"),
        ("raise surrogate", "raised ValueError: ?"),
        ("no repr", "cannot be shown"),
    ],
)
def test_a_strange_result_is_unjudged_with_the_reason(strange_answers, command, reason):
    answer = strange_answers[command]
    assert isinstance(answer, Unjudged)
    assert reason in answer.reason
    assert len(answer.reason) < 600


@pytest.fixture(scope="module")
def strange_answers(rewards):
    from penstock.rollout import new_rollout

    commands = ["nan", "inf", "string", "none", "missing", "huge", "list", "complex", "unknown"]
    commands += [
        "huge string",
        "huge int",
        "part nan",
        "score string",
        "surrogate",
        "raise surrogate",
        "no repr",
        "many parts",
    ]
    rollouts = []
    for command in commands:
        rollouts.append(new_rollout("question"))
        rollouts[-1].response_text = command
    judger = NativeJudgerConfig(reward_handler=rewards.strange, num_workers=1, max_retries=0).build()
    return dict(zip(commands, judge_all(judger, *rollouts), strict=True))


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        ({"call": 1, "score": "high"}, "nonsense"),
        ({"call": 1, "score": math.nan}, "not finite"),
        ({"call": 7, "score": 1.0}, "a reply to another call"),
        ({"score": 1.0}, "a reply to another call"),
        ([1.0], "nonsense"),
    ],
)
def test_a_reply_that_the_worker_did_not_make_is_no_verdict(rewards, make_config, answered, forged, reason):
    body = msgspec.msgpack.encode(forged)
    (answer,) = judge_all(make_config(rewards.forges).build(), answered("a", body))
    assert reason in answer.reason


def test_a_function_that_forks_does_not_answer_for_the_next_rollout(rewards, make_config, answered):
    judger = make_config(rewards.by_command).build()

    async def run():
        answers = [await judger.judge(answered(text)) for text in ("fork", "fine", "fork", "fine")]
        await judger.close()
        return answers

    assert asyncio.run(run()) == [Verdict(7.0), Verdict(1.0)] * 2


def test_exceptions_exits_and_deaths_are_reasons_and_the_worker_is_replaced(rewards, make_config, answered):
    judger = make_config(rewards.by_command).build()
    commands = ["raise", "fine", "sys.exit", "fine", "exit", "fine", "segfault", "fine"]
    answers = judge_all(judger, *map(answered, commands))
    assert answers[0].reason == "raised ValueError: no such thing"
    assert answers[2].reason == "raised SystemExit: 0"
    assert answers[4] == Unjudged("worker died: exit status 3")
    assert answers[6].reason.startswith("worker died: killed by Segmentation fault")
    assert answers[1::2] == [Verdict(1.0)] * 4
    assert asyncio.run(judger.metrics())["worker_deaths"] == 2
    assert asyncio.run(judger.metrics())["unjudged"] == 4


def test_a_judge_that_hangs_never_yields_a_reward_and_is_killed(rewards, make_config, answered):
    judger = make_config(rewards.by_command, timeout_s=0.5).build()
    answers = judge_all(judger, answered("hang"), answered("fine"))
    assert answers == [Unjudged("no answer within 0.5 s; the worker was killed"), Verdict(1.0)]
    assert asyncio.run(judger.metrics())["timeouts"] == 1


def test_four_hanging_calls_do_not_take_the_capacity_of_the_fifth(rewards, make_config, answered):
    judger = make_config(rewards.by_command, timeout_s=0.5, num_workers=4, max_retries=1).build()

    async def run():
        hanging = [asyncio.create_task(judger.judge(answered("hang"))) for _ in range(4)]
        await asyncio.sleep(0)
        fifth = await judger.judge(answered("fine"))
        still_hanging = sum(not task.done() for task in hanging)
        answers = await asyncio.gather(*hanging)
        workers = await asyncio.gather(*(judger.judge(answered("slow pid")) for _ in range(4)))
        await judger.close()
        return fifth, still_hanging, answers, {worker.score for worker in workers}

    fifth, still_hanging, answers, at_work = asyncio.run(run())
    assert fifth == Verdict(1.0)
    assert still_hanging == 4  # it did not have to wait for their retries
    assert all(isinstance(answer, Unjudged) for answer in answers)
    assert len(at_work) == 4  # the whole pool is back
    assert asyncio.run(judger.metrics())["timeouts"] == 8


def test_a_blocking_function_blocks_neither_the_loop_nor_other_rollouts(rewards, make_config, answered):
    judger = make_config(rewards.by_command, timeout_s=1.0, num_workers=2).build()

    async def run():
        hanging = asyncio.create_task(judger.judge(answered("hang")))
        answers = [await judger.judge(answered("fine")) for _ in range(5)]
        done = hanging.done()
        await judger.close()
        return answers, done, await hanging

    answers, done, hung = asyncio.run(run())
    assert answers == [Verdict(1.0)] * 5
    assert not done
    assert hung == Unjudged("the judger was closed during the call")


def test_what_a_function_prints_does_not_disturb_its_answer(rewards, make_config, answered, capfd):
    assert judge_all(make_config(rewards.by_command).build(), answered("print"), answered("fine")) == [Verdict(1.0)] * 2
    assert capfd.readouterr().out == ""


def test_a_call_that_killed_its_worker_is_repeated(rewards, make_config, answered, tmp_path):
    judger = make_config(rewards.fails_once, max_retries=1).build()
    assert judge_all(judger, answered("a", str(tmp_path / "first"))) == [Verdict(1.0)]
    assert asyncio.run(judger.metrics())["calls"] == 2


def test_waiting_for_a_worker_does_not_count_as_the_calls_own_time(rewards, make_config, answered):
    judger = make_config(rewards.by_command, timeout_s=0.5).build()
    answers = judge_all(judger, *map(answered, ["hang", "hang", "fine"]))
    assert answers[2] == Verdict(1.0)


def test_waiting_for_a_worker_ends(rewards, make_config, answered):
    judger = make_config(rewards.by_command, timeout_s=1.0, max_wait_s=0.2).build()
    answers = judge_all(judger, answered("hang"), answered("fine"))
    assert "no answer within" in answers[0].reason
    assert answers[1] == Unjudged("no worker was free; all 1 had calls before")


def test_what_cannot_be_sent_to_a_worker_is_unjudged(rewards, make_config, answered):
    (answer,) = judge_all(make_config(rewards.length).build(), answered("a", object()))
    assert "cannot be sent" in answer.reason


def test_an_async_function_runs_on_the_loop_with_the_deadline(rewards, make_config, answered, workers):
    judger = make_config(rewards.thinks, timeout_s=0.2).build()

    async def run():
        answers = await asyncio.gather(*(judger.judge(answered(say)) for say in ("fine", "hang", "raise", "sys.exit")))
        started = workers()
        await judger.close()
        return answers, started

    answers, started = asyncio.run(run())
    assert answers[0] == Verdict(0.25)
    assert answers[1] == Unjudged("no answer within 0.2 s; the call was cancelled")
    assert answers[2].reason == "raised ValueError: no such thing"
    assert answers[3].reason == "raised SystemExit: 1"
    assert started == []


def test_an_async_function_that_ignores_cancellation_does_not_hold_up_the_rollout(rewards, make_config, answered):
    may_end = threading.Event()
    judger = make_config(rewards.thinks, timeout_s=0.1).build()

    async def run():
        answer = await judger.judge(answered("stubborn", may_end))
        may_end.set()
        await judger.close()
        return answer

    assert isinstance(asyncio.run(run()), Unjudged)


def test_calls_of_an_async_function_are_bounded(make_config, answered):
    running, most = 0, 0

    async def reward(response, label, extra_info):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return 1

    judge_all(make_config(reward, max_concurrency=3).build(), *map(answered, "abcdefgh"))
    assert most == 3


def test_one_judger_serves_several_event_loops_one_after_another(rewards, make_config, answered):
    judger = make_config(rewards.by_command).build()
    first = asyncio.run(judger.judge(answered("pid")))
    second = asyncio.run(judger.judge(answered("pid")))
    asyncio.run(judger.close())
    assert first == second


def test_a_judger_whose_loop_was_left_in_the_middle_of_a_call_works_on_the_next(rewards, make_config, answered):
    judger = make_config(rewards.by_command).build()

    async def leave():
        task = asyncio.create_task(judger.judge(answered("hang")))
        await asyncio.sleep(0)
        return task

    asyncio.run(leave())
    assert judge_all(judger, answered("fine")) == [Verdict(1.0)]


def test_the_cache_answers_the_same_question_once(rewards, make_config, answered, tmp_path):
    calls = str(tmp_path / "calls")
    judger = make_config(rewards.counts_calls, cache_size=1).build()

    async def run():
        answers = [await judger.judge(answered(text, calls)) for text in ("a", "a", "b", "a")]
        await judger.close()
        return answers

    assert [answer.score for answer in asyncio.run(run())] == [1, 1, 2, 3]  # one is remembered, so "a" was forgotten
    assert asyncio.run(judger.metrics())["cache_hits"] == 1


def test_what_differs_in_version_prompt_answer_or_what_tools_said_is_another_question(make_config, answered):
    calls = 0

    async def counts(response, label, extra_info):
        nonlocal calls
        calls += 1
        return float(calls)

    def played(tool_said):
        rollout = answered("4")
        turns = [Turn("generate", 1, FinishReason.STOP, "?"), Turn("tool", 0, None, tool_said, 0, "adder")]
        rollout.turns = (*turns, Turn("generate", 1, FinishReason.STOP, "4"))
        return rollout

    other_prompt = new_rollout("another question")
    other_prompt.response_text = "4"
    asked = [answered("4"), answered("4", "truth"), other_prompt, answered("5"), played("4"), played("3")]
    judgers = JudgerSet()
    first = judgers.get(make_config(counts, cache_size=10, version="1"))
    assert [answer.score for answer in judge_all(first, *asked)] == [1, 2, 3, 4, 5, 6]
    assert [answer.score for answer in judge_all(first, *asked)] == [1, 2, 3, 4, 5, 6]
    second = judgers.get(make_config(counts, cache_size=10, version="2"))
    assert judge_all(second, asked[0]) == [Verdict(7.0)]


def test_repetitions_end_with_the_longest_wait_and_say_what_failed(make_config, answered):
    asked = []

    async def down(response, label, extra_info):
        asked.append(asyncio.get_running_loop().time())
        raise ConnectionError("no service")

    judger = make_config(down, max_retries=10, retry_backoff_s=1.0, max_wait_s=5.0).build()
    answer = run_virtual(judger.judge(answered("a")))
    assert answer.reason == "raised ConnectionError: no service"
    assert asked == [0.0, 1.0, 3.0]  # the next would begin at 7 s


def test_a_wait_that_lets_no_call_be_repeated_is_refused(rewards, make_config):
    with pytest.raises(ConfigError, match="retry_backoff_s is 2 and max_wait_s 1; no call would ever be repeated"):
        make_config(rewards.length, max_retries=1, retry_backoff_s=2.0, max_wait_s=1.0).check()
    with pytest.raises(ConfigError, match=r"retry_backoff_s is 0\.5 and max_wait_s 0\.2"):
        HTTPJudgerConfig(url="http://h/", max_wait_s=0.2).check()
    HTTPJudgerConfig(url="http://h/", max_wait_s=0.2, max_retries=0).check()


def test_siblings_that_wrote_the_same_are_judged_once(make_config, answered):
    calls = 0

    async def slow(response, label, extra_info):
        nonlocal calls
        calls += 1
        number = calls
        await asyncio.sleep(0.05)
        if number == 1 and response == "fails once":
            raise ValueError("no such thing")
        return float(number)

    async def run(text):
        judger = make_config(slow, cache_size=10).build()
        return await asyncio.gather(*(judger.judge(answered(text)) for _ in range(4))), await judger.metrics()

    answers, metrics = asyncio.run(run("same"))
    assert answers == [Verdict(1.0)] * 4
    assert (calls, metrics["cache_hits"]) == (1, 3)
    calls = 0
    answers, _ = asyncio.run(run("fails once"))
    assert isinstance(answers[0], Unjudged)
    assert all(isinstance(answer, Verdict) for answer in answers[1:])  # none waits for another for ever


def test_a_failure_is_not_cached(rewards, make_config, answered, tmp_path):
    judger = make_config(rewards.fails_once, cache_size=10).build()

    async def run():
        rollout = answered("a", str(tmp_path / "first"))
        answers = [await judger.judge(rollout), await judger.judge(rollout)]
        await judger.close()
        return answers

    failed, judged = asyncio.run(run())
    assert isinstance(failed, Unjudged)
    assert judged == Verdict(1.0)


def test_while_the_judge_is_down_calls_wait_instead_of_burning_through_the_data(make_config, answered):
    calls = 0

    async def down(response, label, extra_info):
        nonlocal calls
        calls += 1
        if response == "before":
            return 1.0
        raise ConnectionError("refused")

    judger = make_config(down, breaker_failures=3, breaker_backoff_s=0.1, max_wait_s=0.5).build()

    async def run():
        for text in ("before", "a", "a", "a"):
            await judger.judge(answered(text))
        started = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(judger.judge(answered("a")) for _ in range(50)))
        return answers, asyncio.get_running_loop().time() - started

    answers, waited = asyncio.run(run())
    circuit_open = [answer for answer in answers if answer.reason.startswith("circuit open")]
    assert calls == 1 + 3 + 50 - len(circuit_open)
    assert len(circuit_open) >= 46  # probes after 0.1 and 0.3 s, perhaps one more at the end
    assert "raised ConnectionError: refused" in circuit_open[0].reason
    assert waited >= 0.5


def test_a_verdict_of_the_probe_lets_all_waiting_calls_through(make_config, answered):
    is_down = False

    async def sometimes(response, label, extra_info):
        if is_down:
            raise ConnectionError("refused")
        return 1.0

    judger = make_config(sometimes, breaker_failures=2, breaker_backoff_s=0.05).build()

    async def run():
        nonlocal is_down
        await judger.judge(answered("a"))
        is_down = True
        failed = [await judger.judge(answered("a")) for _ in range(2)]
        is_down = False
        return failed, await asyncio.gather(*(judger.judge(answered("a")) for _ in range(20)))

    failed, answers = asyncio.run(run())
    assert all(isinstance(answer, Unjudged) for answer in failed)
    assert answers == [Verdict(1.0)] * 20
    assert asyncio.run(judger.metrics())["circuit_opened"] == 1


def test_a_cancelled_probe_lets_another_call_probe(make_config, answered):
    mode = "fine"
    probing = asyncio.Event()

    async def moody(response, label, extra_info):
        if mode == "fail":
            raise ConnectionError("refused")
        if mode == "hang":
            probing.set()
            await asyncio.sleep(3600)
        return 1.0

    judger = make_config(moody, breaker_failures=1, breaker_backoff_s=0.01).build()

    async def run():
        nonlocal mode
        await judger.judge(answered("a"))
        mode = "fail"
        await judger.judge(answered("a"))
        mode = "hang"
        probe = asyncio.create_task(judger.judge(answered("a")))
        await probing.wait()
        mode = "fine"
        other = asyncio.create_task(judger.judge(answered("a")))
        await asyncio.sleep(0)
        probe.cancel()
        return await other

    assert asyncio.run(run()) == Verdict(1.0)


def test_an_overloaded_pool_does_not_open_the_circuit(rewards, make_config, answered):
    judger = make_config(rewards.by_command, timeout_s=0.6, max_wait_s=0.1, breaker_failures=2).build()
    judge_all(judger, *map(answered, ["hang", "fine", "fine", "fine"]))
    assert asyncio.run(judger.metrics())["circuit_opened"] == 0


def test_metrics_count_calls_and_time(rewards, make_config, answered):
    judger = make_config(rewards.length).build()
    assert asyncio.run(judger.metrics())["mean_latency_s"] == 0.0
    judge_all(judger, answered("a"), answered("b"))
    metrics = asyncio.run(judger.metrics())
    assert metrics["calls"] == 2
    assert metrics["mean_latency_s"] > 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_closed_judger_says_so(rewards, make_config, answered):
    judger = make_config(rewards.length).build()
    asyncio.run(judger.close())
    assert asyncio.run(judger.judge(answered("a"))) == Unjudged("the judger is closed")


def test_actors_without_ray_are_refused(rewards, make_config):
    with pytest.raises(ConfigError, match="num_ray_actors is 2"):
        make_config(rewards.length, num_ray_actors=2).build()


def test_a_worker_sees_only_the_variables_that_are_named_to_it(rewards, make_config, answered, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hush")
    monkeypatch.setenv("MY_API_KEY", "for the judge")
    judger = make_config(rewards.sees_variable, environment=["MY_API_KEY"]).build()
    seen = judge_all(judger, *(answered("a", name) for name in ("PATH", "MY_SECRET", "MY_API_KEY")))
    assert seen == [Verdict(1.0), Verdict(0.0), Verdict(1.0)]


def test_a_function_sees_apart_what_the_model_wrote_and_what_tools_said():
    rollout = new_rollout("?", extra_info={"row": 1})
    assert InOrder().arguments([rollout])[2] == {"row": 1}
    rollout.response_text = "call4"
    rollout.turns = (
        Turn("generate", 1, FinishReason.STOP, "call"),
        Turn("tool", 0, None, "4", 0, "adder"),
        Turn("message", 2),
        Turn("generate", 1, FinishReason.STOP, "4"),
    )
    response, _, extra_info = InOrder().arguments([rollout])
    assert response == "call4"
    assert [(turn["role"], turn["name"], turn["content"]) for turn in extra_info["turns"]] == [
        ("assistant", "", "call"), ("tool", "adder", "4"), ("assistant", "", "4"),
    ]  # fmt: skip
