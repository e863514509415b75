"""DAPO's mathematics. Its penalty for answers that are too long is `train.overlong`."""

import pytest

from penstock.judger import dapo_math


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("So.\nAnswer: 34", "34", 1.0),
        ("Answer: 3\nno,\nanswer:  $34$", "34", 1.0),
        (r"Answer: \boxed{1,024}.", 1024, 1.0),
        ("Answer: x = 34", "34", 1.0),
        ("**Answer: 34**", "34", 1.0),
        ("Answer: 34.0", "34", 1.0),
        (r"Answer: \frac{1}{2}", r"$\frac{1}{2}$", 1.0),
        ("Answer: 0", "0", 1.0),
        ("Answer: 35", "34", -1.0),
        ("It is 34", "34", -1.0),
        ("Answer: 34" + " " * 300 + "and more", "34", -1.0),
        ("", "34", -1.0),
    ],
)
def test_what_stands_after_the_last_answer_is_compared(response, label, score):
    assert dapo_math(response, label, {}) == {"score": score, "acc": float(score == 1.0)}


def test_a_row_without_a_ground_truth_is_no_wrong_answer():
    for label in (None, "", " $ "):
        with pytest.raises(ValueError, match="ground truth"):
            dapo_math("Answer: 3", label, {})
