"""What no engine can serve is said before it is tried, and what no engine can have answered is not believed."""

from __future__ import annotations

from typing import Any

import pytest
from engine_contract import ask

from penstock.engine.requests import check_request, check_scores, rest_of
from penstock.errors import DataFailure, InfrastructureFailure
from penstock.ports import Completion, check_completion, joined
from penstock.rollout import FailureReason, FinishReason, pack_ids, pack_logprobs


@pytest.mark.parametrize(
    ("prompt", "fields", "reason"),
    [
        ([], {}, FailureReason.EMPTY_PROMPT),
        ([1] * 21, {}, FailureReason.CONTEXT_TOO_LONG),
        ([1] * 19, {"given": [1] * 14, "max_tokens": 12}, FailureReason.CONTEXT_TOO_LONG),
        ([1, 96], {}, FailureReason.TOKEN_OUTSIDE_VOCABULARY),
        ([-1], {}, FailureReason.TOKEN_OUTSIDE_VOCABULARY),
        ([1], {"given": [96]}, FailureReason.TOKEN_OUTSIDE_VOCABULARY),
        ([1], {"stop_token_ids": (96,)}, FailureReason.TOKEN_OUTSIDE_VOCABULARY),
    ],
)
def test_a_request_that_cannot_be_served_is_named_with_the_reason(
    prompt: list[int], fields: dict[str, Any], reason: FailureReason
) -> None:
    with pytest.raises(DataFailure, match="request r: ") as failure:
        check_request(ask("r", prompt, **fields), vocab_size=96, max_context=32)
    assert failure.value.reason is reason


def test_a_request_that_fits_exactly_passes() -> None:
    check_request(ask("r", [0, 95] * 10, given=[95], stop_token_ids=(95,)), vocab_size=96, max_context=32)


def answer(ids: list[int], reason: FinishReason | None = FinishReason.STOP, **fields: Any) -> Completion:
    given = {"logprobs": pack_logprobs([-1.0] * len(ids)), "steps": ((3, len(ids)),) if ids else (), **fields}
    return Completion(ids=pack_ids(ids), finish_reason=reason, **given)


@pytest.mark.parametrize(
    "wrong",
    [
        answer([1, 2], logprobs=pack_logprobs([-1.0])),
        answer([1, 2], steps=((3, 1),)),
        answer([1], logprobs=pack_logprobs([float("nan")])),
        answer([1], None),
        answer([]),
        answer([], FinishReason.LENGTH),
    ],
)
def test_an_answer_that_cannot_be_true_is_the_engines_failure(wrong: Completion) -> None:
    with pytest.raises(InfrastructureFailure) as failure:
        check_completion(wrong, ask("r", max_tokens=8))
    assert failure.value.reason is FailureReason.ENGINE_NONSENSE


def test_no_token_is_an_answer_when_none_was_left_to_ask_for_or_it_was_aborted() -> None:
    check_completion(answer([], FinishReason.LENGTH), ask("r", given=[1, 2, 3], max_tokens=3))
    check_completion(answer([], FinishReason.ABORT), ask("r", max_tokens=8))


def test_the_pieces_of_a_stream_are_its_answer() -> None:
    whole = answer([1, 2, 3, 4], steps=((0, 3), (1, 1)))
    for sent in range(5):
        made = ((0, min(sent, 3)), (1, max(0, sent - 3)))
        first = answer([1, 2, 3, 4][:sent], None, steps=tuple(run for run in made if run[1]))
        assert joined([first, rest_of(whole, sent)]) == whole


@pytest.mark.parametrize("scores", [b"", pack_logprobs([-1.0]), pack_logprobs([-1.0, float("nan")]), b"\0" * 7])
def test_scores_are_finite_and_one_fewer_than_the_tokens(scores: bytes) -> None:
    check_scores(pack_logprobs([-1.0, -2.0]), pack_ids([1, 2, 3]))
    with pytest.raises(InfrastructureFailure):
        check_scores(scores, pack_ids([1, 2, 3]))
