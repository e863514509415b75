"""HTTPJudger: what counts as an answer, and everything that does not."""

import asyncio
import json

import pytest

from penstock.errors import ConfigError, UserFunctionError
from penstock.judger import HTTPJudgerConfig
from penstock.rollout import Unjudged, Verdict

from .services import Service


def judge_all(rollouts, *, group=False, **fields):
    """The answers, the service that gave them, and the judger's metrics."""

    async def run():
        async with Service() as service:
            settings = {"max_retries": 0, "timeout_s": 0.5, "retry_backoff_s": 0.01, "breaker_failures": 100} | fields
            judger = HTTPJudgerConfig(url=service.url, per_group=group, **settings).build()
            try:
                if group:
                    return await judger.judge_group(rollouts), service, await judger.metrics()
                return await asyncio.gather(*map(judger.judge, rollouts)), service, await judger.metrics()
            finally:
                await judger.close()

    return asyncio.run(run())


def test_a_score_and_its_parts_are_read(answered):
    answers, service, _ = judge_all([answered("fine", "label", data_source="sums"), answered("number")])
    assert answers == [Verdict(0.5, {"style": 0.25}, "well"), Verdict(0.75)]
    assert service.seen[0] == {
        "prompt": [{"role": "user", "content": "question"}],
        "response": "fine",
        "label": "label",
        "data_source": "sums",
        "extra_info": {},
    }


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("hang", "no answer within 0.5 s"),
        ("crash", "no answer from http://127.0.0.1"),
        ("half", "no answer from http://127.0.0.1"),
        ("huge", "more than max_answer_bytes, 1048576 bytes"),
        ("nan", "what is no JSON"),
        ("inf", "what is no JSON"),
        ("wrong json", "what is no JSON"),
        ("empty", "what is no JSON"),
        ("deep", "what is no JSON"),
        ("string", "a score must be a number"),
        ("null", "a score must be a number"),
        ("missing", "without 'score'"),
        ("redirect", "a redirect to http://127.0.0.1:9/elsewhere; none is followed"),
        ("gzip", "answered in 'gzip'"),
        ("500", "answered 500: sorry"),
        ("503", "answered 503: sorry"),
        ("404", "answered 404: sorry"),
        ("204", "what is no JSON"),
    ],
)
def test_anything_else_is_unjudged_with_the_reason(answered, command, reason):
    (answer,), _, metrics = judge_all([answered(command)])
    assert isinstance(answer, Unjudged)
    assert reason in answer.reason
    assert metrics["unjudged"] == metrics["calls"] == 1
    assert metrics["timeouts"] == (command == "hang")


def test_what_may_pass_is_tried_again_after_a_moment(answered):
    (answer,), service, metrics = judge_all([answered("once fine")], max_retries=2)
    assert answer == Verdict(0.5, {"style": 0.25}, "well")
    assert len(service.seen) == metrics["calls"] == 2


@pytest.mark.parametrize("command", ["404", "401", "redirect", "gzip"])
def test_what_cannot_pass_is_not_tried_again(answered, command):
    _, service, _ = judge_all([answered(command)], max_retries=3)
    assert len(service.seen) == 1


def test_a_service_that_is_not_there_is_waited_for_and_stops_no_run(answered):
    async def run():
        config = HTTPJudgerConfig(
            url="http://127.0.0.1:9/", max_retries=0, breaker_failures=2, breaker_backoff_s=10, max_wait_s=0.2
        )
        judger = config.build()
        answers = [await judger.judge(answered("fine")) for _ in range(5)]
        await judger.close()
        return answers

    answers = asyncio.run(run())
    assert all(isinstance(answer, Unjudged) for answer in answers)
    assert "ConnectError" in answers[0].reason
    assert answers[-1].reason.startswith("circuit open")


def test_a_service_that_refuses_every_rollout_in_the_same_way_stops_the_run(answered):
    with pytest.raises(UserFunctionError, match="answered 404"):
        judge_all([answered("404") for _ in range(3)], breaker_failures=3)


def test_a_key_is_sent_and_in_no_description(answered):
    (_,), service, _ = judge_all([answered("fine")], api_key="sk-hidden", headers={"x-team": "also hidden"})
    assert service.headers[0]["authorization"] == "Bearer sk-hidden"
    assert service.headers[0]["x-team"] == "also hidden"
    config = HTTPJudgerConfig(url="http://h/", api_key="sk-hidden", headers={"x-team": "also hidden"})
    assert "hidden" not in json.dumps(config.describe())
    assert "hidden" not in repr(config)
    assert config == HTTPJudgerConfig(url="http://h/", api_key="sk-hidden", headers={"x-team": "also hidden"})
    assert config != HTTPJudgerConfig(url="http://h/", api_key="another", headers={"x-team": "also hidden"})


def test_a_group_goes_in_one_request(answered):
    def three(asked):
        assert asked["responses"] == ["a", "bb", "ccc"]
        return 200, b'[0.5, null, {"score": 1, "style": 2}]', {}

    async def run(answer):
        async with Service(answer) as service:
            judger = HTTPJudgerConfig(url=service.url, per_group=True, max_retries=0).build()
            assert judger.relative
            answers = await judger.judge_group([answered(text) for text in ("a", "bb", "ccc")])
            await judger.close()
            return answers

    assert asyncio.run(run(three)) == [Verdict(0.5), Unjudged("returned None"), Verdict(1.0, {"style": 2.0})]
    short = asyncio.run(run(lambda asked: (200, b"[1, 2]", {})))
    assert short == [Unjudged("returned 2 scores for 3 answers")] * 3


def test_the_cache_spares_the_service(answered):
    async def run():
        async with Service() as service:
            judger = HTTPJudgerConfig(url=service.url, cache_size=10).build()
            rollouts = [answered("number"), answered("number"), answered("fine"), answered("number")]
            answers = [await judger.judge(rollout) for rollout in rollouts]
            metrics = await judger.metrics()
            await judger.close()
            return answers, len(service.seen), metrics

    answers, asked, metrics = asyncio.run(run())
    assert [answer.score for answer in answers] == [0.75, 0.75, 0.5, 0.75]
    assert asked == 2
    assert metrics["cache_hits"] == 2


def test_one_judger_serves_one_loop_after_another(answered):
    config = HTTPJudgerConfig(url="http://127.0.0.1:9/", max_retries=0)
    judger = config.build()
    for _ in range(2):
        answer = asyncio.run(judger.judge(answered("fine")))
        assert "ConnectError" in answer.reason
    asyncio.run(judger.close())


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "ftp://host/", "http://", "http:///path", "http://h h/", "http://h:99999/"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="url is"):
        HTTPJudgerConfig(url=url).check()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"url": "http://user:pw-hidden@h/"}, "a password does not belong there"),
        ({"api_key": "sk-hidden\n"}, "strip it if it was read from a file"),
        ({"api_key": ""}, "api_key is empty"),
        ({"headers": {"x-team": "hidden\r\nother: 1"}}, r"headers\['x-team'\] has a line break"),
        ({"headers": {"x-team": "hidd\u00e9n"}}, r"headers\['x-team'\] has"),
        ({"headers": {"x team:": "v"}}, "no name of a header"),
    ],
)
def test_a_secret_that_cannot_be_sent_is_refused_and_not_shown(fields, problem):
    with pytest.raises(ConfigError, match=problem) as refused:
        HTTPJudgerConfig(**{"url": "http://h/"} | fields).check()
    assert "hidden" not in str(refused.value)


def test_what_cannot_be_sent_is_unjudged(answered):
    (answer,), service, _ = judge_all([answered("fine", object())])
    assert "cannot be sent as JSON" in answer.reason
    assert service.seen == []
