from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.produce.split import split_batch

weights = st.dictionaries(st.sampled_from("abcde"), st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1).filter(
    lambda chosen: any(chosen.values())
)


@given(weights, st.integers(1, 200), st.integers(1, 10_000))
def test_a_split_sums_to_the_batch_and_is_never_negative(chosen: dict[str, float], n: int, step: int) -> None:
    sizes = split_batch(chosen, n, step)
    assert set(sizes) == set(chosen)
    assert sum(sizes.values()) == n
    assert min(sizes.values()) >= 0


@given(weights, st.integers(1, 50), st.randoms())
def test_a_split_does_not_depend_on_when_and_how_often_it_is_asked(
    chosen: dict[str, float], n: int, rng: random.Random
) -> None:
    in_order = {step: split_batch(chosen, n, step) for step in range(1, 8)}
    steps = list(in_order) * 2
    rng.shuffle(steps)
    assert all(split_batch(chosen, n, step) == in_order[step] for step in steps)


@given(weights, st.integers(1, 50), st.integers(1, 60))
def test_every_task_has_its_exact_share_in_the_long_run(chosen: dict[str, float], n: int, steps: int) -> None:
    totals: Counter[str] = Counter()
    for step in range(1, steps + 1):
        totals.update(split_batch(chosen, n, step))
    whole = sum(chosen.values())
    for task, weight in chosen.items():
        assert abs(totals[task] - n * steps * weight / whole) < len(chosen)


def test_a_tiny_weight_is_not_starved() -> None:
    totals: Counter[str] = Counter()
    for step in range(1, 1001):
        totals.update(split_batch({"big": 1.0, "tiny": 0.001}, 2, step))
    assert totals["tiny"] == 2


def test_a_task_of_weight_zero_gets_nothing() -> None:
    assert all(split_batch({"a": 1.0, "b": 0.0}, 3, step) == {"a": 3, "b": 0} for step in range(1, 20))


def test_many_steps_later_a_split_is_found_without_walking_there() -> None:
    assert sum(split_batch({"a": 1.0, "b": 2.0, "c": 0.1}, 512, 10**9).values()) == 512
