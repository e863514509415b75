from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout import (
    NO_TOKENS,
    Failure,
    FinishReason,
    RolloutState,
    SampleParams,
    Status,
    Tokens,
    Turn,
    Verdict,
    fill_model_steps,
    get_group_status,
    new_rollout,
    reset_rollout_response,
)


def rollout(status: Status = Status.COMPLETED) -> RolloutState:
    made = new_rollout("1 + 1?", ground_truth="2", data_source="sums", extra_info={"level": 1})
    made.task_name, made.group_id, made.rollout_id, made.status = "sums", "sums:0", "sums:0:0", status
    return made


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.integers(0, 4)), max_size=20))
def test_the_four_columns_of_an_answer_always_have_one_length(pieces: list[tuple[int, bool, int]]) -> None:
    tokens = NO_TOKENS
    for n, trained, step in pieces:
        tokens = tokens.append([7] * n, [-1.0] * n if trained else None, model_step=step, trained=trained)
    state = rollout()
    state.response = tokens
    lengths = {len(state.response_ids), len(state.logprobs), len(state.response_mask), len(state.model_steps)}
    assert lengths == {sum(n for n, _, _ in pieces)}
    assert state.model_steps.tolist() == [step for n, _, step in pieces for _ in range(n)]
    assert state.response_mask.tolist() == [int(trained) for n, trained, _ in pieces for _ in range(n)]


def test_columns_of_different_lengths_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="2 ids, 1 logprobs"):
        NO_TOKENS.append([1, 2], [-1.0])
    with pytest.raises(ValueError, match="differ in length"):
        Tokens(ids=b"\0\0\0\0", logprobs=b"\0\0\0\0", mask=b"\1", steps=((0, 2),))


def test_model_steps_are_kept_as_runs() -> None:
    tokens = NO_TOKENS.append([1, 2], [0.0, 0.0], model_step=1).append([3], [0.0], model_step=1)
    assert tokens.append([4], [0.0], model_step=2).steps == ((1, 3), (2, 1))


def test_tokens_without_logprobs_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="cannot be trained"):
        NO_TOKENS.append([1])


def test_missing_versions_are_filled_and_known_ones_stay() -> None:
    state = rollout()
    state.response = NO_TOKENS.append([1], [0.0], model_step=3).append([2, 3], [0.0, 0.0])
    fill_model_steps(state, 5)
    assert state.model_steps.tolist() == [3, 5, 5]


WORST_FIRST = [Status.FAILED, Status.MAX_TRIES, Status.ABORTED, Status.EXPIRED, Status.FILTERED, Status.COMPLETED]


@pytest.mark.parametrize(("worse", "better"), list(itertools.combinations_with_replacement(WORST_FIRST, 2)))
def test_a_group_has_the_worst_status_of_its_rollouts(worse: Status, better: Status) -> None:
    assert get_group_status([rollout(better), rollout(worse)]) is worse
    assert get_group_status([rollout(worse), rollout(better)]) is worse


def test_an_empty_group_has_no_status() -> None:
    with pytest.raises(ValueError, match="empty"):
        get_group_status([])


@pytest.mark.parametrize("sibling", list(Status))
def test_a_group_with_an_unplayed_rollout_has_no_status(sibling: Status) -> None:
    with pytest.raises(ValueError, match="sums:0:0"):
        get_group_status([rollout(sibling), rollout(Status.INIT)])


def test_resetting_forgets_the_answer_and_keeps_the_rest() -> None:
    state = rollout(Status.EXPIRED)
    untouched = msgspec.structs.replace(state, num_tries=2, infrastructure_failures=1)
    state.num_tries, state.infrastructure_failures = 2, 1
    state.response = NO_TOKENS.append([1], [0.0], model_step=3)
    state.response_text, state.finish_reason, state.reward = "2", FinishReason.STOP, Verdict(1.0)
    state.turns, state.error = (Turn("generate", 1, FinishReason.STOP),), Failure("scripted", "it broke")
    reset_rollout_response(state)
    assert state == untouched


def test_a_failed_rollout_has_no_reward() -> None:
    state = rollout()
    state.reward = Verdict(1.0)
    state.fail(Failure("unjudged", "no answer"))
    assert state.status is Status.FAILED
    assert state.reward is None


def test_a_rollout_survives_the_way_to_disk_and_back() -> None:
    state = rollout()
    state.response = NO_TOKENS.append([1, 2], [-0.5, -1.5], model_step=3)
    state.reward = Verdict(0.5, {"format": 1.0})
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RolloutState)
    assert again == state
    assert np.array_equal(again.logprobs, state.logprobs)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 300}, "min_tokens"),
    ],
)
def test_impossible_sampling_is_refused_by_name(wrong: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SampleParams(**wrong)  # type: ignore[arg-type]


def test_cut_distributions_are_known_as_such() -> None:
    assert not SampleParams().truncates
    assert all(SampleParams(**cut).truncates for cut in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}))  # type: ignore[arg-type]


def test_a_text_is_one_stop() -> None:
    assert SampleParams(stop="</answer>").stop == ("</answer>",)  # type: ignore[arg-type]
    assert SampleParams(stop=("a", "b")).stop == ("a", "b")


def test_a_misspelt_sampling_parameter_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"SampleParams\.max_token is not a field\. Did you mean 'max_tokens'\?"):
        SampleParams(max_token=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"SampleParams\.xyz is not a field\. Known: temperature, top_p"):
        SampleParams(xyz=8)  # type: ignore[call-arg]
    assert SampleParams(max_tokens=8).max_tokens == 8


def test_the_words_of_a_failure_can_always_be_stored() -> None:
    failure = Failure("agent_loop_error", "no such file: b\udcff.txt", detail="é \udcff")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure) == failure
    assert failure.message == "no such file: b\\udcff.txt"
    assert failure.detail == "é \\udcff"
