from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import IllegalTransition
from penstock.replay import DiscardReason, GroupState, Lifecycle, Transition
from penstock.replay.lifecycle import ALLOWED, Conservation

S = GroupState


@pytest.mark.parametrize("source", list(ALLOWED))
@pytest.mark.parametrize("target", list(GroupState))
def test_a_move_that_the_diagram_does_not_have_is_refused_with_the_story(source: S | None, target: S) -> None:
    lifecycle = Lifecycle()
    reason = DiscardReason.FAILED if target is S.DISCARDED else None
    if target in ALLOWED[source]:
        lifecycle.move(Transition("a:1", "a", source, target, reason=reason))
        assert lifecycle.count("a", target) == 1
    else:
        with pytest.raises(IllegalTransition, match=r"'a:1' of task 'a' cannot go .* Its story: drawn long ago"):
            lifecycle.move(Transition("a:1", "a", source, target, reason=reason), lambda: "drawn long ago")
        assert lifecycle.conservation("a").drawn == 0


def test_a_discard_needs_a_reason_and_nothing_else_has_one() -> None:
    lifecycle = Lifecycle()
    lifecycle.move(Transition("a:1", "a", None, S.RUNNING))
    with pytest.raises(IllegalTransition):
        lifecycle.move(Transition("a:1", "a", S.RUNNING, S.DISCARDED))
    with pytest.raises(IllegalTransition):
        lifecycle.move(Transition("a:1", "a", S.RUNNING, S.COMPLETED, reason=DiscardReason.FAILED))


def test_what_is_discarded_stays_discarded() -> None:
    assert ALLOWED[S.DISCARDED] == frozenset()


@given(seed=st.integers(0, 2**32), moves=st.integers(0, 200))
def test_any_walk_through_the_diagram_conserves_the_groups(seed: int, moves: int) -> None:
    rng = random.Random(seed)
    lifecycle = Lifecycle()
    states: dict[str, S] = {}
    for number in range(moves):
        group = rng.choice([*states, f"{rng.choice('ab')}:{number}"])
        source = states.get(group)
        if not ALLOWED[source]:
            continue
        target = rng.choice(sorted(ALLOWED[source]))
        reason = rng.choice(list(DiscardReason)) if target is S.DISCARDED else None
        lifecycle.move(Transition(group, group[0], source, target, reason=reason))
        states[group] = target
        lifecycle.conservation().check()
    for task in "ab":
        lifecycle.conservation(task).check()
        for state in GroupState:
            assert lifecycle.count(task, state) == sum(s is state for g, s in states.items() if g[0] == task)
    restored = Lifecycle()
    restored.restore(
        {task: lifecycle.conservation(task).states for task in "ab"},
        {task: lifecycle.discarded(task) for task in "ab"},
    )
    assert restored.conservation() == lifecycle.conservation()


def test_a_lost_group_is_noticed() -> None:
    with pytest.raises(IllegalTransition, match="conservation broken: drawn 2, held 1"):
        Conservation(drawn=2, states={S.RUNNING: 1}, discarded={}).check()
    with pytest.raises(IllegalTransition, match="conservation broken"):
        Conservation(drawn=1, states={S.DISCARDED: 1}, discarded={}).check()
