from collections.abc import Callable

import numpy as np
import pytest

from penstock.errors import RunError, UserFunctionError
from penstock.learn import OverlongConfig
from penstock.learn.batch import BatchSettings, TrainSegment, prepare_batch
from penstock.rollout import (
    ROOT,
    FinishReason,
    Group,
    Prompt,
    RolloutState,
    Segment,
    Status,
    Tokens,
    Turn,
    Verdict,
    pack_ids,
)

GroupOf = Callable[..., Group]


def test_every_column_of_an_answer_has_one_length_and_its_advantage(group_of: GroupOf) -> None:
    batch = prepare_batch([group_of(scores=[1.0, 3.0])], train_step=1, settings=BatchSettings(advantage="dr_grpo"))
    [group] = batch.groups
    assert group.prompt_ids.tolist() == [3, 4, 5, 6]
    assert [s.ids.tolist() for s in batch.segments] == [[5, 6, 7], [8, 9]]
    assert [s.advantages.tolist() for s in batch.segments] == [[-1.0] * 3, [1.0] * 2]
    assert [s.mask.tolist() for s in batch.segments] == [[1, 1, 1], [1, 1]]
    assert [(s.parent, s.start) for s in batch.segments] == [(ROOT, 4)] * 2
    assert batch.advantages == {"g/0": -1.0, "g/1": 1.0}


def test_columns_that_differ_in_length_cannot_be_made() -> None:
    four, three = np.zeros(4, np.float32), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="must be equal"):
        TrainSegment(np.zeros(4, np.int32), four, three, np.ones(4, np.uint8), np.zeros(4, np.int32), ROOT, 1)


def test_tokens_at_the_staleness_threshold_are_context_and_not_trained(group_of: GroupOf) -> None:
    group = group_of()
    # For step 5 the staleness of these tokens is 3, 2 and 1.
    group[0].response = (
        Tokens().append([5], [-1.0], model_step=1).append([6], [-1.0], model_step=2).append([7], [-1.0], model_step=3)
    )
    batch = prepare_batch([group], train_step=5, settings=BatchSettings(token_stale_thresholds={"": 2}))
    assert batch.segments[0].mask.tolist() == [0, 0, 1]
    assert not batch.on_policy
    assert batch.metrics["staleness/max"] == 4
    assert batch.metrics["staleness/masked_tokens"] == 4
    assert batch.metrics["trained_tokens"] == 1


def test_tool_text_is_not_trained_and_needs_no_model_step(group_of: GroupOf) -> None:
    group = group_of()
    group[0].response = Tokens().append([5], [-1.0], model_step=0).append([6, 7], trained=False)
    batch = prepare_batch([group], train_step=1)
    assert batch.segments[0].mask.tolist() == [1, 0, 0]
    assert batch.metrics["trained_tokens"] == 3


def _fail(rollout: RolloutState) -> None:
    rollout.status = Status.ABORTED


def _unscored(rollout: RolloutState) -> None:
    rollout.reward = None


def _not_a_number(rollout: RolloutState) -> None:
    rollout.reward = Verdict(float("nan"))


def _silent(rollout: RolloutState) -> None:
    rollout.response = Tokens()


def _unpriced(rollout: RolloutState) -> None:
    rollout.response = Tokens().append([5], [float("-inf")], model_step=0)


def _of_unknown_origin(rollout: RolloutState) -> None:
    rollout.response = Tokens().append([5], [-1.0])


def _of_another_prompt(rollout: RolloutState) -> None:
    rollout.prompt = Prompt(ids=pack_ids([9, 9]))


_ONE = Tokens().append([5], [-1.0], model_step=0)


def _after_a_later_segment(rollout: RolloutState) -> None:
    rollout.segments = (Segment(_ONE, 1, 0), Segment(_ONE))


def _after_more_than_there_is(rollout: RolloutState) -> None:
    rollout.segments = (Segment(_ONE), Segment(_ONE, 0, 2))


def _after_nothing(rollout: RolloutState) -> None:
    rollout.segments = (Segment(_ONE, ROOT, 0),)


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (_fail, "not completed"),
        (_unscored, "its score is None"),
        (_not_a_number, "its score is nan"),
        (_silent, "its answer is empty"),
        (_unpriced, "logprob is not finite"),
        (_of_unknown_origin, "no model step"),
        (_of_another_prompt, "not that of its group"),
        (_after_a_later_segment, "segment 0 goes on from segment 1, which is not an earlier one"),
        (_after_more_than_there_is, "segment 1 goes on from token 2 of 1"),
        (_after_nothing, "segment 0 begins with a trained token and has nothing before it"),
    ],
)
def test_a_group_that_cannot_be_trained_is_an_error_that_names_it(
    group_of: GroupOf, spoil: Callable[[RolloutState], None], rule: str
) -> None:
    group = group_of("bad-group")
    spoil(group[1])
    with pytest.raises(RunError, match=f"'bad-group/1' cannot be trained at step 1: .*{rule}"):
        prepare_batch([group_of("fine"), group], train_step=1)


def test_a_group_of_one_is_an_error(group_of: GroupOf) -> None:
    with pytest.raises(RunError, match="prompt_repeat_k must be at least 2"):
        prepare_batch([group_of(answers=[[5]])], train_step=1)


def test_a_batch_without_a_token_to_train_is_an_error(group_of: GroupOf) -> None:
    with pytest.raises(RunError, match="no token"):
        prepare_batch([group_of()], train_step=3, settings=BatchSettings(token_stale_thresholds={"": 1}))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_without_logprobs_is_an_error(group_of: GroupOf, temperature: float) -> None:
    with pytest.raises(RunError, match="temperature"):
        prepare_batch([group_of()], train_step=1, settings=BatchSettings(temperatures={"": temperature}))


def test_the_metrics_are_those_of_the_groups(group_of: GroupOf) -> None:
    cut = group_of("cut", scores=[1.0, 1.0], model_step=0)
    cut[0].finish_reason = FinishReason.LENGTH
    batch = prepare_batch([cut, group_of("fine", scores=[0.0, 2.0], model_step=1)], train_step=2)
    metrics = batch.metrics
    assert metrics["reward/mean"] == 1.0
    assert metrics["reward/std"] == pytest.approx((2 / 3) ** 0.5)
    assert metrics["reward/equal_group_share"] == 0.5
    assert (metrics["length/mean"], metrics["length/max"], metrics["length/truncated_share"]) == (2.5, 3.0, 0.25)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (0.5, 1.0)
    assert (metrics["staleness/tokens_0"], metrics["staleness/tokens_1"]) == (5.0, 5.0)
    assert metrics["trained_tokens"] == 10.0


def test_a_token_of_a_lineage_that_was_left_behind_is_fresh_and_off_policy(group_of: GroupOf) -> None:
    group = group_of()
    assert prepare_batch([group], train_step=1).on_policy
    group[0].response = Tokens().append([5], [-1.0], model_step=7)
    batch = prepare_batch([group], train_step=1)
    assert not batch.on_policy
    assert batch.metrics["staleness/max"] == 0


def test_a_rollout_of_several_segments_has_one_advantage_and_counts_once(
    group_of: GroupOf, branched: Callable[[], list[Group]]
) -> None:
    [group] = branched()
    batch = prepare_batch([group], train_step=1)
    assert batch.advantages == prepare_batch([group_of(scores=[0.0, 1.0])], train_step=1).advantages
    linear, tree = batch.answers
    assert [(s.parent, s.start) for s in tree.segments] == [(ROOT, 4), (0, 2), (0, 4), (ROOT, 2)]
    assert {float(value) for s in tree.segments for value in s.advantages} == {np.float32(tree.advantage)}
    assert (linear.num_trained, tree.num_trained) == (3, 12)
    assert (batch.metrics["length/mean"], batch.metrics["length/max"]) == (7.5, 12)
    assert batch.metrics["trained_tokens"] == batch.metrics["staleness/tokens_0"] == 15


def test_rewards_are_told_by_part_and_by_task_where_there_are_several(group_of: GroupOf) -> None:
    groups = [group_of(name, scores=scores) for name, scores in (("sums", [0.0, 1.0]), ("words", [2.0, 4.0]))]
    for group in groups:
        for rollout in group:
            assert rollout.reward is not None
            rollout.task_name = group[0].group_id
            rollout.reward = Verdict(rollout.reward.score, {"style": rollout.reward.score / 2})
    groups[0][0].reward = Verdict(0.0)
    metrics = prepare_batch(groups, train_step=1).metrics
    assert (metrics["reward/sums/mean"], metrics["reward/words/mean"], metrics["reward/mean"]) == (0.5, 3.0, 1.75)
    assert metrics["reward/parts/style"] == pytest.approx((0.5 + 1 + 2) / 3)
    alone = prepare_batch(groups[:1], train_step=1).metrics
    assert "reward/sums/mean" not in alone


def that_divides_by_zero(scores: list[list[float]]) -> list[list[float]]:
    return [[1 / 0 for _ in group] for group in scores]


def that_is_not_a_number(scores: list[list[float]]) -> list[list[float]]:
    return [[float("nan") for _ in group] for group in scores]


def that_forgets_one(scores: list[list[float]]) -> list[list[float]]:
    return [group[1:] for group in scores]


def that_answers_in_words(scores: list[list[float]]) -> object:
    return "none"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("that_divides_by_zero", "ZeroDivisionError"),
        ("that_is_not_a_number", "2 advantages are not finite, the first is nan"),
        ("that_forgets_one", "one number per score"),
        ("that_answers_in_words", "one number per score"),
    ],
)
def test_an_estimator_of_the_users_that_fails_is_named(group_of: GroupOf, name: str, problem: str) -> None:
    with pytest.raises(UserFunctionError, match=rf"test_batch\.{name} \(.*\), groups of \[2\]: .*{problem}"):
        prepare_batch([group_of()], train_step=1, settings=BatchSettings(advantage=f"{__name__}.{name}"))


def _long_group(finish: list[FinishReason], lengths: list[int]) -> Group:
    group = make_long(lengths)
    for rollout, reason in zip(group, finish, strict=True):
        rollout.finish_reason = reason
    return group


def make_long(lengths: list[int]) -> Group:
    prompt = Prompt(ids=pack_ids([3, 4]))
    return [
        RolloutState(
            prompt=prompt,
            task_name="sums",
            group_id="g",
            rollout_id=f"g/{index}",
            segments=(Segment(Tokens().append([7] * length, [-1.0] * length, model_step=0)),),
            finish_reason=FinishReason.STOP,
            reward=Verdict(1.0),
            status=Status.COMPLETED,
        )
        for index, length in enumerate(lengths)
    ]


def test_the_last_tokens_of_the_budget_cost_score() -> None:
    """DAPO's soft punishment: budget 10, buffer 4: nothing up to 6, then a quarter per token, all of it from 10 on."""
    settings = BatchSettings(
        advantage="dr_grpo", overlong=OverlongConfig(buffer_tokens=4, penalty=2.0), max_tokens={"sums": 10}
    )
    batch = prepare_batch([make_long([2, 6, 7, 9, 10, 12])], train_step=1, settings=settings)
    assert [answer.score for answer in batch.answers] == pytest.approx([1.0, 1.0, 0.5, -0.5, -1.0, -1.0])
    assert batch.metrics["reward/mean"] == 1.0
    assert batch.metrics["reward/shaped_mean"] == pytest.approx(0.0)
    own_budget = BatchSettings(overlong=OverlongConfig(buffer_tokens=4, max_tokens=100), max_tokens={"sums": 10})
    batch = prepare_batch([make_long([2, 12])], train_step=1, settings=own_budget)
    assert [answer.score for answer in batch.answers] == [1.0, 1.0]


def test_answers_that_the_budget_cut_off_are_not_trained_and_stay_in_the_baseline() -> None:
    group = _long_group([FinishReason.STOP, FinishReason.LENGTH], [2, 3])
    group[1].reward = Verdict(0.0)
    settings = BatchSettings(advantage="dr_grpo", overlong=OverlongConfig(mask_truncated=True))
    batch = prepare_batch([group], train_step=1, settings=settings)
    assert [answer.num_trained for answer in batch.answers] == [2, 0]
    assert batch.answers[0].advantage == 0.5
    assert batch.metrics["length/masked_tokens"] == 3 and batch.metrics["staleness/masked_tokens"] == 0


def test_a_batch_of_nothing_but_cut_off_answers_has_no_trained_token_and_is_no_error() -> None:
    group = _long_group([FinishReason.LENGTH, FinishReason.LENGTH], [2, 3])
    settings = BatchSettings(advantage="none", overlong=OverlongConfig(mask_truncated=True))
    teacher = {"g/0": [np.full(2, -1.0, np.float32)], "g/1": [np.full(3, -1.0, np.float32)]}
    batch = prepare_batch([group], train_step=1, settings=settings, teacher=teacher)
    assert batch.is_idle and batch.metrics["trained_tokens"] == 0 and batch.metrics["length/masked_tokens"] == 5
    assert np.isfinite(list(batch.metrics.values())).all()


def test_tokens_have_the_temperature_and_the_threshold_of_their_task(group_of: GroupOf) -> None:
    sums, words = group_of("a"), group_of("b")
    for rollout in words:
        rollout.task_name = "words"
    settings = BatchSettings(temperatures={"": 0.5, "words": 2.0}, token_stale_thresholds={"words": 1})
    for rollout in sums:
        rollout.response = Tokens().append([5, 6], [-1.0, -1.0], model_step=0)
    for rollout in words:
        rollout.response = Tokens().append([5], [-1.0], model_step=0).append([6], [-1.0], model_step=1)
    batch = prepare_batch([sums, words], train_step=2, settings=settings)
    assert [s.temperatures.tolist() for s in batch.segments] == [[0.5, 0.5]] * 2 + [[2.0, 2.0]] * 2
    assert [s.mask.tolist() for s in batch.segments] == [[1, 1]] * 2 + [[0, 1]] * 2


def test_a_teacher_adds_to_the_advantage_of_each_trained_token(group_of: GroupOf) -> None:
    group = group_of(scores=[1.0, 0.0], logprob=-2.0)
    group[0].response = Tokens().append([5, 6], [-2.0, -1.0], model_step=0).append([7], trained=False)
    teacher = {
        "g/0": [np.asarray([-1.0, -4.0, np.nan], np.float32)],
        "g/1": [np.asarray([-2.0, -2.5], np.float32)],
    }
    settings = BatchSettings(advantage="dr_grpo", distill_coef=0.1)
    batch = prepare_batch([group], train_step=1, settings=settings, teacher=teacher)
    # 0.5 - 0.1 * (log p - log q), and -0.5 - ...
    assert batch.segments[0].advantages[:2].tolist() == pytest.approx([0.6, 0.2])
    assert batch.segments[1].advantages.tolist() == pytest.approx([-0.5, -0.55])
    assert not batch.is_idle
    alone = BatchSettings(advantage="none")
    assert prepare_batch([group], train_step=1, settings=alone).is_idle
    teacher["g/0"][0][0] = np.nan
    with pytest.raises(RunError, match="the teacher's logprob of a trained token is not finite"):
        prepare_batch([group], train_step=1, settings=settings, teacher=teacher)


def test_turns_and_calls_of_tools_are_counted_with_the_reasons_why_they_failed(group_of: GroupOf) -> None:
    group = group_of(scores=[1.0, 3.0])
    assert not [n for n in prepare_batch([group], train_step=1).metrics if n.startswith(("turns/", "tools/"))]
    group[0].turns = (Turn("generate", 1), Turn("tool", 0), Turn("message", 1), Turn("generate", 1))
    group[1].turns = (Turn("generate", 2), *(Turn("tool", 0, outcome=why) for why in ("", "timeout", "raised")))
    counted = prepare_batch([group], train_step=1).metrics
    assert {name: value for name, value in counted.items() if name.startswith(("turns/", "tools/"))} == {
        "turns/mean": 1.5,
        "turns/per_segment": 1.5,
        "tools/calls_mean": 2.0,
        "tools/failed_share": 0.5,
        "tools/timeout_share": 0.25,
        "tools/raised_share": 0.25,
    }
