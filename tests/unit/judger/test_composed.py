"""Several judgers as one, what a task's judger_config may be, and sharing."""

import asyncio

import pytest

from penstock.errors import ConfigError
from penstock.judger import (
    ComposedJudgerConfig,
    JudgerConfig,
    JudgerSet,
    NativeJudgerConfig,
    as_judger_config,
    exact_match,
    weighted_sum,
)
from penstock.ports import Judger
from penstock.rollout import Unjudged, Verdict


def judge(config, *rollouts):
    async def run():
        judger = config.build()
        try:
            return [await judger.judge(rollout) for rollout in rollouts]
        finally:
            await judger.close()

    return asyncio.run(run())


class RankConfig(JudgerConfig):
    def build(self, placement=None):
        return RankJudger()


class RankJudger(Judger):
    relative = True

    async def judge(self, rollout):
        return Unjudged("needs the group")

    async def judge_group(self, group):
        order = sorted(group, key=lambda rollout: len(rollout.response_text))
        return [Verdict(float(order.index(rollout))) for rollout in group]


def test_what_a_judger_config_may_be(rewards):
    native = NativeJudgerConfig(reward_handler=rewards.length)
    assert as_judger_config(None) is None
    assert as_judger_config(native) is native
    assert as_judger_config(rewards.length) == native
    assert as_judger_config({"gsm8k": rewards.length, "math": native}) == ComposedJudgerConfig(
        branches={"gsm8k": native, "math": native}
    )
    assert as_judger_config({"gsm8k": rewards.length}).data_sources == {"gsm8k"}
    assert native.data_sources is None
    named = NativeJudgerConfig(reward_handler="json.dumps")
    assert as_judger_config("json.dumps") == named
    assert as_judger_config({"gsm8k": "json.dumps"}) == ComposedJudgerConfig(branches={"gsm8k": named})
    for wrong in (3, RankConfig, {"a": 3}, {"a": None}):
        with pytest.raises(ConfigError):
            as_judger_config(wrong)


def test_each_data_source_has_its_judger(rewards, answered):
    config = as_judger_config({"short": rewards.thinks, "long": rewards.length})
    assert list(config.problems()) == []
    answers = judge(
        config,
        answered("abc", data_source="short"),
        answered("abc", data_source="long"),
        answered("abc", data_source="lon"),
    )
    assert answers == [Verdict(0.25), Verdict(3.0), Unjudged("no branch for data_source 'lon'. Did you mean 'long'?")]


def test_problems_of_a_branch_are_found(make_config):
    with pytest.raises(ConfigError, match=r"branches\.a: reward_handler: .*lambda"):
        ComposedJudgerConfig(branches={"a": lambda response, label, extra_info: 1.0}).check()


def test_two_judgers_without_a_merge_function_are_refused(rewards):
    config = ComposedJudgerConfig(all_of={"a": rewards.length, "b": rewards.rich})
    with pytest.raises(ConfigError, match="no merge function"):
        config.check()
    with pytest.raises(ConfigError, match="no merge function"):
        config.build()


def test_what_cannot_work_together_is_refused(rewards):
    for fields, reason in [
        ({}, "needs either branches"),
        ({"branches": {"a": rewards.length}, "all_of": {"a": rewards.length}, "merge": rewards.average}, "not both"),
        ({"branches": {"a": rewards.length}, "merge": rewards.average}, "branches are not merged"),
        ({"all_of": {"a": rewards.length}, "merge": lambda verdicts: 1.0}, "lambda"),
        ({"all_of": {"a": rewards.length}, "merge": weighted_sum, "weights": {"b": 1.0}}, "must name all_of's"),
        ({"all_of": {"a": rewards.length}, "merge": weighted_sum}, "no weights are given: missing .* 'weights'"),
        (
            {"all_of": {"a": rewards.length}, "merge": rewards.average, "weights": {"a": 1.0}},
            "because weights are given: too many",
        ),
        ({"branches": {"a": as_judger_config({"b": rewards.length})}}, "does not serve 'a'"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            ComposedJudgerConfig(**fields).check()


def test_verdicts_are_merged(rewards, answered):
    config = ComposedJudgerConfig(all_of={"length": rewards.length, "think": rewards.thinks}, merge=rewards.average)
    assert config.data_sources is None
    assert judge(config, answered("abc")) == [Verdict(1.625)]


def test_a_merge_function_may_be_async(rewards, answered):
    async def best(verdicts):
        return max(verdicts.values(), key=lambda verdict: verdict.score)

    config = ComposedJudgerConfig(all_of={"think": rewards.thinks}, merge=best)
    assert judge(config, answered("abc")) == [Verdict(0.25)]


def test_verdicts_are_merged_with_weights(rewards, answered):
    config = ComposedJudgerConfig(
        all_of={"length": rewards.length, "think": rewards.thinks},
        merge=weighted_sum,
        weights={"length": 0.5, "think": 2.0},
    )
    assert judge(config, answered("abc")) == [Verdict(2.0, {"length": 3.0, "think": 0.25})]


def test_one_part_without_a_verdict_leaves_the_rollout_without_one(rewards, answered):
    config = ComposedJudgerConfig(all_of={"length": rewards.length, "think": rewards.thinks}, merge=rewards.average)
    (answer,) = judge(config, answered("raise"))
    assert answer.reason == "think: raised ValueError: no such thing"
    assert 'raise ValueError("no such thing")' in answer.detail


def test_a_merge_function_that_hangs_has_a_deadline(rewards, answered):
    config = ComposedJudgerConfig(all_of={"a": rewards.thinks}, merge=rewards.hanging_merge, merge_timeout_s=0.2)
    assert judge(config, answered("a")) == [Unjudged("merge: no answer within 0.2 s; the worker was killed")]


def test_metrics_count_the_rollouts_that_a_merge_function_left_unjudged(answered):
    async def merge(verdicts):
        return verdicts["a"].score or None

    async def length(response, label, extra_info):
        return len(response)

    judger = ComposedJudgerConfig(all_of={"a": length}, merge=merge).build()

    async def run():
        answers = [await judger.judge(answered(text)) for text in ("", "bb", "c")]
        return answers, await judger.metrics()

    answers, metrics = asyncio.run(run())
    assert isinstance(answers[0], Unjudged)
    assert answers[1:] == [Verdict(2.0), Verdict(1.0)]
    assert (metrics["a/calls"], metrics["a/unjudged"]) == (3, 0)
    assert (metrics["merge/calls"], metrics["merge/unjudged"]) == (3, 1)


def test_a_group_goes_to_the_branch_that_ranks(rewards, answered):
    judger = as_judger_config({"rank": RankConfig(), "think": rewards.thinks}).build()
    assert judger.relative
    group = [answered(text, data_source="rank") for text in ("aaa", "a", "aa")]
    assert asyncio.run(judger.judge_group(group)) == [Verdict(2.0), Verdict(0.0), Verdict(1.0)]
    group = [answered(text, data_source="think") for text in "ab"]
    assert asyncio.run(judger.judge_group(group)) == [Verdict(0.25)] * 2
    group = [answered(text, data_source="other") for text in "ab"]
    assert all(isinstance(answer, Unjudged) for answer in asyncio.run(judger.judge_group(group)))
    assert asyncio.run(judger.judge_group([])) == []


def test_ranks_are_merged_with_scores(rewards, answered):
    judger = ComposedJudgerConfig(all_of={"rank": RankConfig(), "think": rewards.thinks}, merge=rewards.average).build()

    async def run():
        answers = await judger.judge_group([answered("aa"), answered("a")])
        await judger.close()
        return answers

    assert asyncio.run(run()) == [Verdict(0.625), Verdict(0.125)]


def test_training_and_evaluation_share_one_judger_and_its_processes(rewards, answered, workers):
    judgers = JudgerSet()
    train = judgers.get(as_judger_config({"a": rewards.length, "b": exact_match}))
    again = judgers.get(as_judger_config({"a": rewards.length, "b": exact_match}))
    alone = judgers.get(as_judger_config(rewards.length))
    other = judgers.get(NativeJudgerConfig(reward_handler=rewards.length, num_workers=1))
    assert train is again
    assert other is not alone

    async def run():
        await train.judge(answered("abc", data_source="a"))
        shared = workers()
        await alone.judge(answered("abc"))
        same = workers()
        await judgers.close()
        return shared, same, workers()

    shared, same, left = asyncio.run(run())
    assert len(shared) == 1
    assert shared == same
    assert left == []


def test_metrics_name_the_branch(rewards):
    judger = as_judger_config({"a": rewards.thinks}).build()
    assert asyncio.run(judger.metrics())["a/calls"] == 0
