"""What `dtype="auto"` stands for: by what was measured, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from penstock.models.arithmetic import MARGIN, ROUNDS, choose, cpu_name, fastest, shortest, try_out, work_of
from penstock.models.bfloat16 import has_fast_products

LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256,
)  # fmt: skip


class Clock:
    """Goes on when something is done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, *seconds: float) -> Callable[[], None]:
        """Takes so long the first time, the second, ...; the last again and again."""
        left = list(seconds)

        def run() -> None:
            self.done.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_bfloat16_is_taken_where_it_is_clearly_faster() -> None:
    assert fastest({"float32": 1.0, "bfloat16": 0.5}).dtype == "bfloat16"
    assert fastest({"float32": 1.0, "bfloat16": 0.99 / MARGIN}).dtype == "bfloat16"
    assert fastest({"float32": 1.0, "bfloat16": 1.01 / MARGIN}).dtype == "float32"
    assert fastest({"float32": 1.0}).dtype == "float32"


def test_what_was_left_aside_is_said_by_how_much_longer_it_takes() -> None:
    assert fastest({"float32": 1.0, "bfloat16": 3.0}).other_takes == 3.0
    assert fastest({"float32": 4.0, "bfloat16": 1.0}).other_takes == 4.0
    assert fastest({"float32": 1.0}).other_takes is None


def test_ways_are_tried_in_turns_and_the_shortest_time_of_each_counts() -> None:
    clock = Clock()
    found = shortest({"a": clock.work("a", 0.03, 0.03, 0.01, 0.05), "b": clock.work("b", 0.02)}, clock)
    assert found == pytest.approx({"a": 0.01, "b": 0.02})
    assert clock.done == ["a", "b"] * (1 + ROUNDS)


def test_the_first_time_of_each_does_not_count_so_that_kernels_that_are_made_then_are_not_held_against_it() -> None:
    clock = Clock()
    found = shortest({"a": clock.work("a", 0.01), "b": clock.work("b", 0.1, 0.005)}, clock)
    assert found == pytest.approx({"a": 0.01, "b": 0.005})
    found = shortest({"a": clock.work("a", 0.001, 0.01), "b": clock.work("b", 0.005)}, clock)
    assert found == pytest.approx({"a": 0.01, "b": 0.005})


def test_a_hopeless_way_is_timed_once() -> None:
    clock = Clock()
    found = shortest({"a": clock.work("a", 0.01), "b": clock.work("b", 0.1)}, clock)
    assert found == pytest.approx({"a": 0.01, "b": 0.1})
    assert clock.done == ["a", "b", "a", "b", "a", "a", "a"]


def test_on_a_machine_so_busy_that_time_runs_out_each_is_timed_once() -> None:
    clock = Clock()
    shortest({"a": clock.work("a", 1.0), "b": clock.work("b", 1.0)}, clock)
    assert clock.done == ["a", "b", "a", "b"]


def test_float32_of_an_engine_is_tried_packed_where_the_engine_would_pack() -> None:
    small, large = work_of(LLAMA, rows=4), work_of(LLAMA, rows=4)
    assert small is not None and large is not None
    large = large._replace(layers=500)
    assert not small.packs and large.packs and not large._replace(trains=True).packs
    seconds = try_out(large)
    assert set(seconds) == {"float32", "bfloat16"} and min(seconds.values()) > 0


def test_nothing_is_tried_where_nothing_is_left_open() -> None:
    work = work_of(LLAMA, rows=4)
    assert choose("bfloat16", work, deterministic=True) == ("bfloat16", {})
    assert choose("float32", work, deterministic=False) == ("float32", {})
    assert choose("auto", work, deterministic=True) == ("float32", {})
    assert choose("auto", None, deterministic=False) == ("float32", {})


def test_a_model_without_fused_passes_has_no_products_to_try() -> None:
    assert work_of(GPT2Config(), rows=4) is None


@pytest.mark.parametrize("trains", [False, True])
def test_a_trial_multiplies_the_matrices_of_the_model(trains: bool) -> None:
    work = work_of(LLAMA, rows=4, trains=trains)
    assert work is not None
    assert work.matrices == ((128, 64), (64, 64), (256, 64), (64, 128), (128, 64))
    seconds = try_out(work)
    # bfloat16 that trains must be summed in float32: by MKL, or not at all.
    assert set(seconds) == ({"float32"} if trains and not has_fast_products() else {"float32", "bfloat16"})
    assert min(seconds.values()) > 0
    choice = choose("auto", work, deterministic=False)
    assert choice.torch_dtype in (torch.float32, torch.bfloat16)


@pytest.mark.long_tier
def test_a_trial_of_a_large_model_takes_a_part_of_each_matrix() -> None:
    large = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=8, vocab_size=200_000
    )
    work = work_of(large, rows=1 << 14)
    assert work is not None
    assert min(try_out(work).values()) > 0


def test_the_cpu_is_named_with_its_widest_arithmetic() -> None:
    assert cpu_name().endswith(")")
