"""What a reward function returned, checked."""

import decimal
import fractions
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.judger.worker import as_reply

steady = settings(derandomize=True, suppress_health_check=[HealthCheck.too_slow])
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("score"), inner),
    max_leaves=8,
)


@steady
@given(anything)
def test_a_reply_is_a_finite_score_that_was_returned_or_a_reason(value):
    reply = as_reply(value)
    if "unjudged" in reply:
        assert set(reply) == {"unjudged"}
        assert reply["unjudged"]
        return
    score = value["score"] if isinstance(value, dict) else value
    assert isinstance(score, int | float)
    assert reply["score"] == float(score)
    assert math.isfinite(reply["score"])
    assert all(math.isfinite(part) and float(value[name]) == part for name, part in reply["parts"].items())


@steady
@given(st.floats(allow_nan=False, allow_infinity=False), st.dictionaries(st.text(min_size=1), st.integers(-9, 9)))
def test_a_finite_score_is_never_refused(score, parts):
    parts.pop("score", None)
    assert as_reply({"score": score, **parts}) == {"score": score, "parts": parts, "text": None}


@pytest.mark.parametrize(
    "half", [np.float32(0.5), np.array(0.5), decimal.Decimal("0.5"), fractions.Fraction(1, 2), np.float64(0.5)]
)
def test_numbers_of_other_libraries_count(half):
    assert as_reply(half)["score"] == 0.5


@pytest.mark.parametrize("array", [np.array([0.5]), np.array([1.0, 2.0]), np.array("0.5")])
def test_arrays_and_text_in_disguise_do_not(array):
    assert "unjudged" in as_reply(array)


def test_true_is_one():
    assert as_reply(True)["score"] == 1.0
    assert as_reply({"score": np.bool_(False)})["score"] == 0.0
