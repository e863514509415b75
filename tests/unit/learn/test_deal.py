from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.deal import deal
from penstock.rollout import Group

RandomGroups = Callable[..., list[Group]]
GroupOf = Callable[..., Group]


def _load(batch: TrainBatch, answers: np.ndarray) -> int:
    """Tokens to compute, prompts once."""
    prompts = {}
    load = 0
    index = -1
    for group in batch.groups:
        for answer in group.answers:
            index += 1
            if index in answers and answer.num_trained:
                load += sum(len(segment) for segment in answer.segments)
                prompts[group.prompt_ids.tobytes()] = len(group.prompt_ids)
    return load + sum(prompts.values())


@given(seed=st.integers(0, 1000), num_groups=st.integers(1, 6), num_ranks=st.integers(1, 7))
def test_every_answer_is_dealt_once_and_the_same_way_again(
    random_groups: RandomGroups, seed: int, num_groups: int, num_ranks: int
) -> None:
    batch = prepare_batch(random_groups(seed, num_groups=num_groups, k=3), train_step=1)
    hands = deal(batch, num_ranks)
    assert len(hands) == num_ranks
    assert sorted(np.concatenate(hands).tolist()) == list(range(3 * num_groups))
    assert [hand.tolist() for hand in deal(batch, num_ranks)] == [hand.tolist() for hand in hands]


def test_one_group_is_divided_and_several_stay_whole(group_of: GroupOf) -> None:
    answers = [[7] * 10] * 8
    several = prepare_batch([group_of(f"g{n}", prompt=[3 + n, 4], answers=answers) for n in range(4)], train_step=1)
    assert [hand.tolist() for hand in deal(several, 2)] == [
        [*range(8), *range(16, 24)],
        [*range(8, 16), *range(24, 32)],
    ]
    one = prepare_batch([group_of(answers=answers)], train_step=1)
    assert [len(hand) for hand in deal(one, 2)] == [4, 4]
    assert [len(hand) for hand in deal(one, 8)] == [1] * 8


def test_ranks_have_about_the_same_to_compute(random_groups: RandomGroups) -> None:
    batch = prepare_batch(random_groups(3, num_groups=8, k=8, longest=60), train_step=1)
    loads = [_load(batch, hand) for hand in deal(batch, 4)]
    assert max(loads) < 1.1 * sum(loads) / 4


def test_what_is_not_trained_costs_nothing_unless_every_token_is_asked_for(group_of: GroupOf) -> None:
    batch = prepare_batch([group_of(answers=[[5] * 40, [6] * 40, [7] * 4, [8] * 4])], train_step=1)
    silent = [
        replace(answer, segments=[replace(s, mask=np.zeros_like(s.mask)) for s in answer.segments]) if n < 2 else answer
        for n, answer in enumerate(batch.answers)
    ]
    batch = replace(batch, groups=[replace(batch.groups[0], answers=silent)])
    trained = [set(hand.tolist()) & {2, 3} for hand in deal(batch, 2)]
    assert [len(each) for each in trained] == [1, 1]
    every = [{int(n) for n in hand} & {0, 1} for hand in deal(batch, 2, every_token=True)]
    assert [len(each) for each in every] == [1, 1]


def test_a_rank_may_have_nothing(group_of: GroupOf) -> None:
    batch = prepare_batch([group_of(answers=[[5, 6], [7]])], train_step=1)
    assert sorted(len(hand) for hand in deal(batch, 5)) == [0, 0, 0, 1, 1]
