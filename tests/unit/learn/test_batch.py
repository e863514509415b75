from collections.abc import Callable

import numpy as np
import pytest

from penstock.errors import RunError
from penstock.learn.batch import TrainAnswer, prepare_batch
from penstock.rollout import FinishReason, Group, Prompt, RolloutState, Status, Tokens, Verdict, pack_ids

GroupOf = Callable[..., Group]


def test_every_column_of_an_answer_has_one_length_and_its_advantage(group_of: GroupOf) -> None:
    batch = prepare_batch([group_of(scores=[1.0, 3.0])], train_step=1, advantage="dr_grpo")
    [group] = batch.groups
    assert group.prompt_ids.tolist() == [3, 4, 5, 6]
    assert [a.ids.tolist() for a in group.answers] == [[5, 6, 7], [8, 9]]
    assert [a.advantages.tolist() for a in group.answers] == [[-1.0] * 3, [1.0] * 2]
    assert [a.mask.tolist() for a in group.answers] == [[1, 1, 1], [1, 1]]


def test_columns_that_differ_in_length_cannot_be_made() -> None:
    four, three = np.zeros(4, np.float32), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="must be equal"):
        TrainAnswer("r", np.zeros(4, np.int32), four, three, np.ones(4, np.uint8), np.zeros(4, np.int32), 0.0)


def test_tokens_at_the_staleness_threshold_are_context_and_not_trained(group_of: GroupOf) -> None:
    group = group_of()
    # For step 5 the staleness of these tokens is 3, 2 and 1.
    group[0].response = (
        Tokens().append([5], [-1.0], model_step=1).append([6], [-1.0], model_step=2).append([7], [-1.0], model_step=3)
    )
    batch = prepare_batch([group], train_step=5, max_token_staleness_threshold=2)
    assert batch.groups[0].answers[0].mask.tolist() == [0, 0, 1]
    assert not batch.on_policy
    assert batch.metrics["staleness/max"] == 4
    assert batch.metrics["staleness/masked_tokens"] == 4
    assert batch.metrics["trained_tokens"] == 1


def test_tool_text_is_not_trained_and_needs_no_model_step(group_of: GroupOf) -> None:
    group = group_of()
    group[0].response = Tokens().append([5], [-1.0], model_step=0).append([6, 7], trained=False)
    batch = prepare_batch([group], train_step=1)
    assert batch.groups[0].answers[0].mask.tolist() == [1, 0, 0]
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
        prepare_batch([group_of()], train_step=3, max_token_staleness_threshold=1)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_without_logprobs_is_an_error(group_of: GroupOf, temperature: float) -> None:
    with pytest.raises(RunError, match="temperature"):
        prepare_batch([group_of()], train_step=1, temperature=temperature)


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
