import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.torch_engine.cache import LayerShape, Prefix
from penstock.engine.torch_engine.prefix import Prefixes

LAYERS = [LayerShape(1, 1, 1)]
TOLD = list(range(100, 120))


def key_of(ids: list[int]) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


def sums(ids: list[int]) -> list[float]:
    """Stands for keys and values: each depends on all tokens up to its own."""
    return np.cumsum(np.asarray(ids, np.float32) * np.arange(1, len(ids) + 1)).tolist()  # type: ignore[no-any-return]


class Computer:
    """Computes as a model does, and counts the tokens."""

    def __init__(self, *, share_beginnings: bool = True) -> None:
        self.prefixes = Prefixes(LAYERS, torch.float32, torch.device("cpu"), share_beginnings=share_beginnings)
        self.tokens = 0

    def want(self, *prompts: list[int]) -> None:
        for ids in prompts:
            self.prefixes.want(key_of(ids))
            self.prefixes.start(key_of(ids))

    def round(self, budget: int = 1_000) -> bool:
        parts = self.prefixes.next_parts(budget, alone=False)
        for prefix, count in parts:
            computed = sums(prefix.ids.tolist())[prefix.done : prefix.done + count]
            prefix.keys[0][0, prefix.done : prefix.done + count, 0] = torch.tensor(computed)
            prefix.done += count
            self.tokens += count
        return bool(parts)

    def finish(self, budget: int = 1_000) -> None:
        while self.round(budget):
            pass

    def take(self, ids: list[int]) -> Prefix:
        """Ready and right; nobody waits for it any more."""
        prefix = self.prefixes.get(key_of(ids))
        assert prefix is not None and prefix.ready
        assert prefix.keys[0][0, : len(ids), 0].tolist() == sums(ids)
        self.prefixes.unwant(key_of(ids))
        return prefix


def test_what_prompts_begin_with_is_computed_once() -> None:
    computer = Computer()
    prompts = [[*TOLD, 1, 2], [*TOLD, 1, 3], [*TOLD, 4]]
    computer.want(*prompts)
    computer.finish()
    assert computer.tokens == len(TOLD) + 2 + 1 + 1
    for prompt in prompts:
        computer.take(prompt)


def test_a_prompt_that_comes_when_the_others_are_gone_begins_as_the_last_of_them() -> None:
    computer = Computer()
    computer.want([*TOLD, 1])
    computer.finish()
    computer.take([*TOLD, 1])
    computer.want([*TOLD, 2])
    computer.finish()
    assert computer.tokens == len(TOLD) + 2
    computer.take([*TOLD, 2])


def test_new_weights_make_everything_anew() -> None:
    computer = Computer()
    computer.want([*TOLD, 1], [*TOLD, 2])
    computer.round(budget=4)
    computer.prefixes.forget()
    for last in (1, 2):
        computer.prefixes.start(key_of([*TOLD, last]))
    computer.tokens = 0
    computer.finish()
    assert computer.tokens == len(TOLD) + 2
    computer.take([*TOLD, 1])
    computer.prefixes.forget()
    computer.tokens = 0
    computer.want([*TOLD, 3])
    computer.finish()
    assert computer.tokens == len(TOLD) + 1


def test_short_beginnings_are_not_waited_for() -> None:
    computer = Computer()
    computer.want([*TOLD[:7], 1], [*TOLD[:7], 2])
    assert len(computer.prefixes.next_parts(100, alone=False)) == 2


def test_a_prompt_does_not_wait_for_one_that_nobody_wants_any_more() -> None:
    computer = Computer()
    computer.want([*TOLD, 1], [*TOLD, 2])
    computer.round(budget=4)
    computer.prefixes.unwant(key_of([*TOLD, 1]))
    computer.want([*TOLD, 1])
    computer.finish()
    computer.take([*TOLD, 1])
    computer.take([*TOLD, 2])


PROMPTS = [[*TOLD[:common], *range(first, first + 3)] for common in (0, 5, 9, 20) for first in (1, 2, 50)]


@settings(max_examples=200)
@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("want"), st.integers(0, len(PROMPTS) - 1)),
            st.tuples(st.just("unwant"), st.integers(0, len(PROMPTS) - 1)),
            st.tuples(st.just("compute"), st.integers(1, 30)),
        ),
        max_size=40,
    ),
    share=st.booleans(),
)
def test_whoever_comes_and_goes_every_prompt_that_is_wanted_is_ready_in_the_end_and_right(
    moves: list[tuple[str, int]], share: bool
) -> None:
    computer = Computer(share_beginnings=share)
    wanted: set[int] = set()
    for move, number in moves:
        if move == "compute":
            computer.round(number)
        elif move == "want" and number not in wanted:
            wanted.add(number)
            computer.want(PROMPTS[number])
        elif move == "unwant" and number in wanted:
            wanted.remove(number)
            computer.prefixes.unwant(key_of(PROMPTS[number]))
    computer.finish(budget=7)
    for number in sorted(wanted):
        computer.take(PROMPTS[number])
