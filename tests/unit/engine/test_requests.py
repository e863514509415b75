"""What no engine can serve is said before it is tried."""

from __future__ import annotations

from typing import Any

import pytest
from engine_contract import ask

from penstock.engine.requests import check_request
from penstock.errors import DataFailure


@pytest.mark.parametrize(
    ("prompt", "fields", "reason"),
    [
        ([], {}, "empty prompt"),
        ([1] * 21, {}, "context too long"),
        ([1] * 19, {"given": [1] * 14, "max_tokens": 12}, "context too long"),
        ([1, 96], {}, "token outside vocabulary"),
        ([-1], {}, "token outside vocabulary"),
        ([1], {"given": [96]}, "token outside vocabulary"),
        ([1], {"stop_token_ids": (96,)}, "token outside vocabulary"),
    ],
)
def test_a_request_that_cannot_be_served_is_named_with_the_reason(
    prompt: list[int], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataFailure, match="request r: ") as failure:
        check_request(ask("r", prompt, **fields), vocab_size=96, max_context=32)
    assert failure.value.reason == reason


def test_a_request_that_fits_exactly_passes() -> None:
    check_request(ask("r", [0, 95] * 10, given=[95], stop_token_ids=(95,)), vocab_size=96, max_context=32)
