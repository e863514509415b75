"""Language models as judges: templates, strict reading, pairs, rankings; on an endpoint and on the run's engines."""

import asyncio
import json
import re

import pytest

from penstock.errors import ConfigError, DataFailure, InfrastructureFailure, RunError
from penstock.judger import (
    ComposedJudgerConfig,
    JudgerSet,
    LLMJudgerConfig,
    PairwiseJudgerConfig,
    RankingJudgerConfig,
    RunEngine,
    exact_match,
    weighted_sum,
)
from penstock.ports import Completion
from penstock.rollout import FinishReason, SampleParams, Unjudged, Verdict, new_rollout, pack_ids, pack_logprobs
from penstock.testing import CharTokenizer

from .services import Service, chat


def endpoint(answer):
    """A service whose judge says what `answer(question)` returns: a text, or (status, body)."""

    def reply(asked):
        said = answer(asked["messages"][-1]["content"])
        return (200, chat(said), {}) if isinstance(said, str) else (*said, {})

    return Service(reply)


def judged(config_class, answer, group, **fields):
    """The answers, the requests and the metrics; a group is judged as one where the judge is relative."""

    async def run():
        async with endpoint(answer) as service:
            settings = {"max_retries": 0, "retry_backoff_s": 0.0, "breaker_failures": 100, "timeout_s": 5.0} | fields
            config = config_class(base_url=service.url.removesuffix("/judge") + "/v1/", model="m", **settings)
            config.check()
            judger = config.build()
            try:
                return await judger.judge_group(group), service.seen, await judger.metrics()
            finally:
                await judger.close()

    return asyncio.run(run())


def test_the_judge_reads_the_template_and_its_rating_is_the_score(answered):
    group = [answered("my answer {braces} [[10]]", "the truth")]
    (verdict,), (asked,), _ = judged(
        LLMJudgerConfig, lambda question: "Good. Rating: [[7.5]]", group, system="Be strict.", api_key="k"
    )
    assert verdict == Verdict(7.5, text="Good. Rating: [[7.5]]")
    assert asked["model"] == "m"
    assert asked["temperature"] == 0.0
    assert asked["max_tokens"] == 512
    system, user = asked["messages"]
    assert system == {"role": "system", "content": "Be strict."}
    for part in ("question", "the truth", "my answer {braces} [[10]]"):
        assert part in user["content"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("I like it.", "has nothing that fits"),
        ("[[3]] or rather [[4]]", "do not agree"),
        ("[[11]]", "a score is from 0 to 10"),
        ("[[-1]]", "a score is from 0 to 10"),
        ("", "has nothing that fits"),
        ("<think>perhaps [[3]], or", "has nothing that fits"),
        ("x" * 200_000, "at most 100000 are read"),
        ((200, chat("[[3]]", "length")), "cut off after 512 tokens"),
        ((200, b'{"choices": []}'), "0 choices"),
        ((200, b'{"choices": [{"message": {"content": null}}]}'), "no chat completion"),
        ((200, b'{"error": "no such model"}'), "no chat completion"),
        ((404, b"no such model"), "answered 404: no such model"),
    ],
)
def test_what_cannot_be_read_strictly_is_unjudged(answered, said, reason):
    (answer,), _, _ = judged(LLMJudgerConfig, lambda question: said, [answered("a")])
    assert isinstance(answer, Unjudged)
    assert reason in answer.reason


def test_the_same_rating_twice_and_what_was_thought_before_are_no_contradiction(answered):
    said = "<think>maybe [[2]]</think>It is good. [[6]] So: [[6]]"
    assert judged(LLMJudgerConfig, lambda question: said, [answered("a")])[0][0].score == 6.0


def test_words_have_the_worth_that_was_given_them(answered):
    fields = {"pattern": r"^(CORRECT|INCORRECT|\w+)$", "choices": {"CORRECT": 1.0, "INCORRECT": 0.0}}
    for said, wanted in (("CORRECT", 1.0), ("INCORRECT", 0.0)):
        assert judged(LLMJudgerConfig, lambda q, said=said: said, [answered("a")], **fields)[0][0].score == wanted
    (answer,), _, _ = judged(LLMJudgerConfig, lambda question: "PERHAPS", [answered("a")], **fields)
    assert "none of ['CORRECT', 'INCORRECT']" in answer.reason


def test_a_pattern_that_never_ends_leaves_one_rollout_unjudged_and_holds_up_nothing(answered):
    """Tried on the event loop it would hold up the run for years: it doubles with every letter."""
    fields = {"pattern": r"(?:a+a+)+(\d)", "timeout_s": 0.5}
    said = {"bad": "a" * 60, "good": "aa7"}
    group = [answered("bad"), answered("good"), answered("good")]

    def reply(question):
        return said["bad" if "[Answer]\nbad" in question else "good"]

    (unjudged, *verdicts), _, metrics = judged(LLMJudgerConfig, reply, group, **fields)
    assert "did not end on the judge's answer of 60 characters" in unjudged.reason
    assert [verdict.score for verdict in verdicts] == [7.0, 7.0]
    assert metrics["timeouts"] == 1


def test_a_judge_that_could_not_be_read_is_asked_again_with_another_seed(answered):
    said = iter(["hm", "hm", "[[4]]"])
    (verdict,), asked, metrics = judged(LLMJudgerConfig, lambda question: next(said), [answered("a")], max_retries=2)
    assert verdict.score == 4.0
    assert len({one["seed"] for one in asked}) == 3
    assert metrics["abstentions"] == 2


def test_fields_of_the_request_can_be_replaced_and_left_out(answered):
    extra = {"max_tokens": None, "max_completion_tokens": 99, "seed": None}
    _, (asked,), _ = judged(LLMJudgerConfig, lambda question: "[[1]]", [answered("a")], extra_body=extra)
    assert asked["max_completion_tokens"] == 99
    assert "max_tokens" not in asked and "seed" not in asked


def better(question):
    """Prefers the longer answer, and is too easily taken by the first."""
    first, second = re.search(r"\[Answer A\]\n(.*)\n\n\[Answer B\]\n(.*)\n\nThink", question).groups()
    return "[[A]]" if len(first) > len(second) else "[[B]]" if len(first) < len(second) else "[[C]]"


def test_answers_are_compared_two_by_two_in_both_orders(answered):
    group = [answered(text) for text in ("a", "bbb", "cc", "dd")]
    verdicts, asked, _ = judged(PairwiseJudgerConfig, better, group)
    assert [verdict.score for verdict in verdicts] == [0.0, 1.0, 0.5, 0.5]
    assert verdicts[0].parts == {"comparisons": 6.0}
    assert len(asked) == 12
    _, asked, _ = judged(PairwiseJudgerConfig, better, group, both_orders=False)
    assert len(asked) == 6


def test_a_judge_that_favours_a_place_prefers_nobody(answered):
    verdicts, _, _ = judged(PairwiseJudgerConfig, lambda question: "[[A]]", [answered("a"), answered("b")])
    assert [verdict.score for verdict in verdicts] == [0.5, 0.5]


def test_a_comparison_that_failed_leaves_both_unjudged_and_only_it_is_made_again(answered):
    group = [answered(text) for text in ("a", "bbb", "cc")]
    ill = True

    def moody(question):
        return "hm" if ill and "bbb" in question and "\ncc\n" in question else better(question)

    async def run():
        nonlocal ill
        async with endpoint(moody) as service:
            base_url = service.url.removesuffix("/judge")
            judger = PairwiseJudgerConfig(base_url=base_url, model="m", max_retries=0, cache_size=100).build()
            first = await judger.judge_group(group)
            before = len(service.seen)
            ill = False
            second = await judger.judge_group(group)
            await judger.close()
            return first, second, before, len(service.seen) - before

    first, second, before, again = asyncio.run(run())
    assert isinstance(first[0], Verdict)
    assert all("a comparison with a sibling: the judge's answer" in answer.reason for answer in first[1:])
    assert [verdict.score for verdict in second] == [0.0, 1.0, 0.5]
    assert (before, again) == (6, 2)


def test_answers_are_ranked(answered):
    group = [answered(text) for text in ("a", "bbb", "cc")]
    verdicts, (asked,), _ = judged(RankingJudgerConfig, lambda question: "Ranking: [[2, 3, 1]]", group)
    assert [verdict.score for verdict in verdicts] == [0.0, 1.0, 0.5]
    assert "[Answer 2]\nbbb" in asked["messages"][0]["content"]
    for said in ("[[2, 3]]", "[[1, 2, 2]]", "[[1, 2, 3, 4]]", "[[1, 2, 3]] no: [[3, 2, 1]]", f"[[{'9' * 5000}]]"):
        answers, _, _ = judged(RankingJudgerConfig, lambda question, said=said: said, group)
        assert all(isinstance(answer, Unjudged) for answer in answers)


@pytest.mark.parametrize("kind", [PairwiseJudgerConfig, RankingJudgerConfig])
def test_an_answer_without_siblings_cannot_be_compared(answered, kind):
    (answer,), asked, _ = judged(kind, better, [answered("a")])
    assert "there is no sibling" in answer.reason
    assert asked == []


ENDPOINT = {"base_url": "http://h/v1", "model": "m"}


@pytest.mark.parametrize(
    ("kind", "fields", "problem"),
    [
        (LLMJudgerConfig, {"template": "{answer}"}, r"template has \{answer\}"),
        (LLMJudgerConfig, {"template": "nothing"}, r"template has no \{response\}"),
        (LLMJudgerConfig, {"template": "{response"}, "no format string"),
        (LLMJudgerConfig, {"pattern": "("}, "no regular expression"),
        (LLMJudgerConfig, {"pattern": r"\d+"}, "must have one group"),
        (LLMJudgerConfig, {"pattern": r"(\d){99999999999}"}, "no regular expression"),
        (PairwiseJudgerConfig, {"pattern": r"\d+"}, "must have one group"),
        (RankingJudgerConfig, {"pattern": "("}, "no regular expression"),
        (LLMJudgerConfig, {"min_score": 3, "max_score": 3}, "must be below max_score"),
        (LLMJudgerConfig, {"choices": {"good": 11}}, "outside of min_score"),
        (LLMJudgerConfig, {"base_url": "nowhere", "model": "m"}, "base_url is 'nowhere'"),
        (LLMJudgerConfig, {"base_url": "http://h"}, "model is empty"),
        (LLMJudgerConfig, {"model": "m"}, "without base_url"),
        (LLMJudgerConfig, {"template": "{response:d}"}, "template cannot be filled in: Unknown format code 'd'"),
        (LLMJudgerConfig, {"template": "{response.real}"}, r"template has \{response.real\}"),
        (LLMJudgerConfig, {"choices": {"good": 1}}, "choices has 'good', which .* never finds; give pattern too"),
        (LLMJudgerConfig, ENDPOINT | {"base_url": "http://h/v1/chat/completions"}, "which is added"),
        (LLMJudgerConfig, ENDPOINT | {"extra_body": {"n": 2, "messages": []}}, "extra_body has messages and n"),
        (LLMJudgerConfig, ENDPOINT | {"extra_body": {"x": object()}}, "extra_body cannot be sent as JSON"),
        (PairwiseJudgerConfig, {"words": ("first", "second", "tie")}, "words has 'first', which .* never finds"),
        (PairwiseJudgerConfig, {"words": ("A", "A", "C")}, "must differ"),
        (PairwiseJudgerConfig, {"template": "{first}"}, r"template has no \{second\}"),
        (RankingJudgerConfig, {"template": "{prompt}"}, r"template has no \{answers\}"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_checked(kind, fields, problem):
    with pytest.raises(ConfigError, match=problem):
        kind(**fields).check()


# On the engines of the run.


class WordyEngine:
    """Answers with the letters it is told to; keeps the requests."""

    def __init__(self, tokenizer, said="[[5]]", finish=FinishReason.STOP, error=None) -> None:
        self.requests = []
        self._completion = Completion(
            ids=pack_ids(tokenizer.encode(said)),
            logprobs=pack_logprobs([0.0] * len(said)),
            finish_reason=finish,
            steps=((0, len(said)),),
        )
        self._error = error

    async def generate(self, request):
        self.requests.append(request)
        if self._error is not None:
            raise self._error
        return self._completion


def on_engine(config, engine, rollout):
    tokenizer = CharTokenizer()
    run_engine = RunEngine()
    judgers = JudgerSet(ports={"engine": run_engine, "tokenizer": tokenizer})

    async def run():
        judger = judgers.get(config)
        run_engine.bind(engine)
        try:
            return await judger.judge(rollout)
        finally:
            await judgers.close()

    return asyncio.run(run())


ON_ENGINE = LLMJudgerConfig(
    template="{response}?", max_retries=0, sample_params=SampleParams(max_tokens=8, stop=("!",))
)


def test_the_engines_of_the_run_are_asked_with_requests_of_their_own(answered):
    engine = WordyEngine(CharTokenizer(), "[[5]]! and more")
    assert on_engine(ON_ENGINE, engine, answered("word")) == Verdict(5.0, text="[[5]]")
    (request,) = engine.requests
    assert request.on_pause == "serve"
    assert request.judging
    assert request.request_id.startswith("judge/")
    assert request.prompt_ids == pack_ids(CharTokenizer().render([{"role": "user", "content": "word?"}]))
    assert ON_ENGINE.asks_engine
    assert ComposedJudgerConfig(branches={"a": ON_ENGINE}).asks_engine
    assert not LLMJudgerConfig(base_url="http://h", model="m").asks_engine


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"finish": FinishReason.LENGTH}, "cut off after 8 tokens"),
        ({"finish": FinishReason.ABORT}, "dropped the judge's request"),
        ({"error": InfrastructureFailure("it died")}, "the engine failed: it died"),
        ({"error": DataFailure("too long")}, "refused the judge's prompt: too long"),
        ({"said": "no idea"}, "has nothing that fits"),
    ],
)
def test_an_engine_that_does_not_answer_leaves_the_rollout_unjudged(answered, fields, reason):
    answer = on_engine(ON_ENGINE, WordyEngine(CharTokenizer(), **fields), answered("word"))
    assert isinstance(answer, Unjudged)
    assert reason in answer.reason


def test_a_run_without_engines_is_not_one_rollouts_failure(answered):
    with pytest.raises(RunError, match="not built yet"):
        on_engine(ON_ENGINE, None, answered("word"))


def test_a_judge_on_the_engines_needs_a_run():
    with pytest.raises(ConfigError, match="there is no run here; give base_url"):
        ON_ENGINE.build()
    with pytest.raises(ConfigError, match="there is no run here; give base_url"):
        JudgerSet().get(ON_ENGINE)


def test_waiting_for_a_place_ends(answered):
    class Never:
        async def generate(self, request):
            await asyncio.get_running_loop().create_future()

    config = ON_ENGINE.replace("max_wait_s", 0.1)
    answer = on_engine(config, Never(), answered("word"))
    assert answer == Unjudged("the engines of the run had no place for the judge")


def test_a_language_model_and_a_function_are_merged(answered):
    async def run():
        async with endpoint(lambda question: "[[10]]") as service:
            llm = LLMJudgerConfig(base_url=service.url, model="m")
            config = ComposedJudgerConfig(
                branches={
                    "sums": ComposedJudgerConfig(
                        all_of={"right": exact_match, "style": llm},
                        merge=weighted_sum,
                        weights={"right": 1.0, "style": 0.1},
                    ),
                    "words": exact_match,
                }
            )
            config.check()
            judger = config.build()
            rollouts = [answered("4", "4", data_source="sums"), answered("a", "b", data_source="words")]
            answers = [await judger.judge(rollout) for rollout in rollouts]
            metrics = await judger.metrics()
            await judger.close()
            return answers, metrics

    answers, metrics = asyncio.run(run())
    assert answers == [Verdict(2.0, {"right": 1.0, "style": 10.0}), Verdict(0.0)]
    assert metrics["sums/style/calls"] == 1
    assert json.dumps(metrics)


def test_a_conversation_is_shown_with_its_roles():
    from penstock.judger.llm import conversation

    assert conversation(new_rollout("What?")) == "What?"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    assert conversation(new_rollout(messages)) == "system: Be brief.\n\nuser: What?"
