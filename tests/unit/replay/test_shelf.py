from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.replay.shelf import Entry, Order, Shelf
from penstock.replay.staleness import NEVER
from penstock.rollout import Prompt, RolloutState

expiries = st.lists(st.integers(1, 10) | st.just(NEVER), max_size=30)


def entry(sequence: int, expires_at: int) -> Entry:
    made = Entry.drawn([RolloutState(prompt=Prompt(), group_id=f"g{sequence}")], sequence)
    made.expires_at = expires_at
    return made


@given(expiries, st.sampled_from(["fifo", "stalest_first"]), st.randoms(use_true_random=False))
def test_groups_leave_in_replay_order_however_they_came(found: list[int], order: Order, rng: object) -> None:
    shelf = Shelf(order)
    entries = [entry(sequence, expires_at) for sequence, expires_at in enumerate(found)]
    arrivals = list(entries)
    rng.shuffle(arrivals)  # type: ignore[attr-defined]
    for arriving in arrivals:
        shelf.add(arriving)
    key = (lambda e: e.sequence) if order == "fifo" else (lambda e: (e.expires_at, e.sequence))
    assert [shelf.pop_first() for _ in range(len(shelf))] == sorted(entries, key=key)


@given(expiries, st.integers(0, 12), st.sampled_from(["fifo", "stalest_first"]))
def test_exactly_the_expired_leave_and_the_rest_keep_their_order(found: list[int], step: int, order: Order) -> None:
    shelf = Shelf(order)
    entries = [entry(sequence, expires_at) for sequence, expires_at in enumerate(found)]
    for arriving in entries:
        shelf.add(arriving)
    assert {e.sequence for e in shelf.pop_expired(step)} == {e.sequence for e in entries if e.expires_at <= step}
    left = [shelf.pop_first().sequence for _ in range(len(shelf))]
    assert sorted(left) == [e.sequence for e in entries if e.expires_at > step]
    assert order != "fifo" or left == sorted(left)


def test_an_entry_that_comes_back_with_another_expiry_is_found_under_the_new_one_only() -> None:
    shelf = Shelf("stalest_first")
    mine, other = entry(0, 3), entry(1, 5)
    shelf.add(mine)
    shelf.add(other)
    shelf.remove(mine)
    mine.expires_at = 9
    shelf.add(mine)
    assert list(shelf.pop_expired(4)) == []
    assert [shelf.pop_first(), shelf.pop_first()] == [other, mine]


def test_dropped_tokens_are_told_once() -> None:
    mine = entry(0, NEVER)
    mine.tokens = 10
    mine.waste("retried", 3)
    mine.waste("retried", 1)
    mine.waste("aborted", 2)
    assert mine.tokens == 4
    assert mine.take_waste() == (("retried", 4), ("aborted", 2))
    assert mine.take_waste() == ()
