"""The reward functions that come with Penstock."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.judger import (
    NativeJudgerConfig,
    exact_match,
    final_number,
    matching_characters,
    math_equal,
    reasoning_gym_score,
)
from penstock.rollout import Verdict

steady = settings(derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def test_exact_match_ignores_white_space_around():
    assert exact_match(" Paris\n", "Paris", {}) == 1.0
    assert exact_match("paris", "Paris", {}) == 0.0
    assert exact_match("4", 4, {}) == 1.0


def test_a_row_without_ground_truth_is_not_judged():
    for function in (exact_match, final_number, matching_characters, math_equal):
        with pytest.raises(ValueError, match="no ground truth"):
            function("4", None, {})


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("So she has 42.", "He bakes 6 * 7 = 42 cakes.\n#### 42", 1.0),
        ("#### 42", "42", 1.0),
        ("42 apples, or 43", "#### 42", 0.0),
        ("It costs $1,234.50 in all.", "#### 1234.5", 1.0),
        ("1,234,567", "#### 1,234,567", 1.0),
        ("the balance is -7", "#### -7", 1.0),
        ("the balance is \u22127", "#### -7", 1.0),
        ("10-7", "#### 7", 1.0),
        ("x = 3.0", 3, 1.0),
        ("half of it: .5", 0.5, 1.0),
        ("-$5", "-5", 1.0),
        ("I do not know", "#### 42", 0.0),
        ("", "#### 42", 0.0),
        ("0", "#### -0", 1.0),
        ("\\boxed{72}", "#### 72", 1.0),
        ("**18**", "18", 1.0),
    ],
)
def test_final_number(response, label, score):
    assert final_number(response, label, {}) == score


@steady
@given(st.decimals(-(10**9), 10**9, places=2), st.text(alphabet="abc $#\n(=*"))
def test_a_number_is_found_however_it_is_written(number, before):
    assert final_number(f"{before} {number:,}", f"#### {number}", {}) == 1.0


@steady
@given(st.text())
def test_final_number_has_an_answer_for_every_text(response):
    assert final_number(response, "#### 12345.678", {}) in (0.0, 1.0)


def test_a_ground_truth_without_a_number_is_not_judged():
    with pytest.raises(ValueError, match="has no number"):
        final_number("4", "#### four", {})


@steady
@given(st.text(), st.text())
def test_matching_characters_is_a_share_and_one_only_when_equal(response, label):
    score = matching_characters(response, label, {})
    assert 0.0 <= score <= 1.0
    assert (score == 1.0) == (response == label)


def test_matching_characters_counts_positions():
    assert matching_characters("abcx", "abcd", {}) == 0.75
    assert matching_characters("ab", "abcd", {}) == 0.5
    assert matching_characters("abcdefgh", "abcd", {}) == 0.5


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("\\boxed{\\frac12}", "0.5", 1.0),
        ("so $x=3$", "3", 1.0),
        ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1.0),
        ("1/2", "\\frac{1}{2}", 1.0),
        ("\\boxed{42}", "$42$", 1.0),
        ("the answer is 4", "5", 0.0),
        ("no idea", "5", 0.0),
    ],
)
def test_math_equal(response, label, score):
    assert math_equal(response, label, {}) == score


def test_a_ground_truth_that_is_no_mathematics_is_not_judged():
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        math_equal("4", "", {})


@pytest.mark.long_tier
def test_reasoning_gym_scores_its_own_entries_in_a_worker(answered):
    import reasoning_gym

    rollouts = []
    for name in ("leg_counting", "countdown", "spell_backward"):
        entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
        info = {"gym": name, "entry": entry}
        rollouts.append(answered(f"I think <answer>{entry['answer']}</answer>", entry["answer"], extra_info=info))
        rollouts.append(answered("no idea", entry["answer"], extra_info=info))
    judger = NativeJudgerConfig(reward_handler=reasoning_gym_score, num_workers=1).build()

    async def run():
        answers = [await judger.judge(rollout) for rollout in rollouts]
        await judger.close()
        return answers

    answers = asyncio.run(run())
    assert answers[::2] == [Verdict(1.0)] * 3
    assert all(isinstance(answer, Verdict) and answer.score < 0.5 for answer in answers[1::2])


def test_the_cascade_of_reasoning_gym_is_used_where_it_is_installed(monkeypatch):
    """As its documents describe it; the releases on PyPI do not have it yet."""
    import sys
    import types

    import reasoning_gym

    from penstock.judger import rewards

    entry = reasoning_gym.create_dataset("leg_counting", size=1, seed=1)[0]
    info = {"gym": "leg_counting", "entry": entry}
    lenient = rf"<answer>\({entry['answer']}\)</answer>"
    strict = reasoning_gym_score(lenient, None, info)
    assert strict < 1.0

    def cascade_score(answer, expected, dataset=None, entry=None):
        assert dataset.score_answer(expected, entry) == 1.0
        return 1.0 if answer.strip("\\()") == expected else 0.0

    module = types.ModuleType("reasoning_gym.scoring")
    module.cascade_score = cascade_score
    monkeypatch.setitem(sys.modules, "reasoning_gym.scoring", module)
    rewards._cascade_score.cache_clear()
    try:
        assert reasoning_gym_score(lenient, None, info) == 1.0
        assert reasoning_gym_score("<answer>none</answer>", None, info) < 1.0
    finally:
        rewards._cascade_score.cache_clear()
