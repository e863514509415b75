from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.replay import StaleRule, calculate_seq_staleness, calculate_stale_threshold, group_staleness
from penstock.replay.staleness import NEVER, ModelSteps, rollout_staleness
from penstock.rollout import Group, Prompt, RolloutState, Status, Tokens, linear

steps = st.integers(0, 20)
runs = st.lists(st.tuples(steps, st.integers(1, 3)), max_size=4)
rules = st.builds(StaleRule, st.integers(1, 6), st.none() | st.integers(1, 6))


def rollout(*model_steps: tuple[int, int], status: Status = Status.COMPLETED) -> RolloutState:
    tokens = Tokens()
    for step, n in model_steps:
        tokens = tokens.append([1] * n, [0.0] * n, model_step=step)
    return RolloutState(prompt=Prompt(), segments=linear(tokens), status=status)


def is_expired(found: RolloutState, rule: StaleRule, train_step: int) -> bool:
    """Expired for this step or for one before: what expired once is not trained later."""
    return any(_is_expired_for(found, rule, step) for step in range(1, train_step + 1))


def _is_expired_for(found: RolloutState, rule: StaleRule, train_step: int) -> bool:
    """The definition, token by token."""
    staleness = [train_step - m - 1 for m, n in found.response.steps for _ in range(n)]
    if not staleness:
        return False
    if rule.token_stale_threshold is not None:
        staleness = [s for s in staleness if s < rule.token_stale_threshold]
        if not staleness:
            return True
    return max(staleness) >= rule.stale_threshold


@pytest.mark.parametrize(("max_staleness", "interval", "threshold"), [(0, 1, 1), (0, 4, 4), (2, 1, 3), (1, 3, 6)])
def test_the_threshold_counts_sync_periods(max_staleness: int, interval: int, threshold: int) -> None:
    assert calculate_stale_threshold(max_staleness, interval) == threshold


@pytest.mark.parametrize(("max_staleness", "interval"), [(-1, 1), (0, 0), (0, -2)])
def test_impossible_thresholds_are_refused(max_staleness: int, interval: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        calculate_stale_threshold(max_staleness, interval)


def test_tokens_by_the_weights_just_before_a_step_have_staleness_zero() -> None:
    assert calculate_seq_staleness(model_step=4, train_step=5) == 0
    assert calculate_seq_staleness(model_step=2, train_step=5) == 2


def test_a_version_from_a_lost_lineage_is_not_negative() -> None:
    assert calculate_seq_staleness(model_step=9, train_step=5) == 0


@given(runs, rules, st.integers(1, 40))
def test_the_step_of_expiry_agrees_with_the_definition(
    model_steps: list[Any], rule: StaleRule, train_step: int
) -> None:
    found = rollout(*model_steps)
    assert (rule.expires_at(found) <= train_step) == is_expired(found, rule, train_step)


@given(st.lists(st.tuples(runs, st.sampled_from(Status)), min_size=1, max_size=4), rules, st.integers(1, 40))
def test_marking_expires_exactly_what_is_too_stale_and_says_what_is_next(
    parts: list[Any], rule: StaleRule, train_step: int
) -> None:
    group: Group = [rollout(*model_steps, status=status) for model_steps, status in parts]
    first = rule.first_expiry(group)
    upcoming = rule.mark_expired(group, train_step)
    live = []
    for found, (_, before) in zip(group, parts, strict=True):
        waits = before in (Status.COMPLETED, Status.ABORTED)
        expected = Status.EXPIRED if waits and is_expired(found, rule, train_step) else before
        assert found.status is expected
        if waits and expected is before:
            live.append(rule.expires_at(found))
    assert upcoming == min(live, default=NEVER) > train_step
    assert first <= upcoming
    assert (first <= train_step) == any(r.status is not before for r, (_, before) in zip(group, parts, strict=True))


def test_a_rollout_without_tokens_never_expires() -> None:
    assert StaleRule(1).expires_at(rollout()) == NEVER
    assert rollout_staleness(rollout(), 50) == 0


def test_the_staleness_of_a_group_is_that_of_its_oldest_token() -> None:
    assert group_staleness([rollout((3, 2)), rollout((1, 1), (4, 1))], 5) == 3


def test_the_model_steps_are_those_that_decide_the_expiry() -> None:
    group = [rollout(), rollout(), rollout()]
    assert ModelSteps.of(group) == ModelSteps(None, None, None)
    group = [rollout((2, 1), (9, 1)), rollout((5, 1)), rollout()]
    assert ModelSteps.of(group) == ModelSteps(2, 5, 9)


@settings(max_examples=200)
@given(rule=rules, made=st.lists(runs, min_size=1, max_size=4))
def test_the_model_steps_say_when_the_first_rollout_of_a_group_expires(
    rule: StaleRule, made: list[list[tuple[int, int]]]
) -> None:
    group = [rollout(*each) for each in made]
    found = ModelSteps.of(group)
    assert rule.limit(found.oldest, found.oldest_newest) == rule.first_expiry(group)
