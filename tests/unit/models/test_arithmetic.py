"""What `dtype="auto"` stands for: by what was measured, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, LlamaConfig

from penstock.models.arithmetic import MARGIN, ROUNDS, Work, choose, cpu_name, fastest, shortest, try_out, work_of

BOTH = (torch.float32, torch.bfloat16)

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


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this CPU one with or without AMX, that packs these dtypes or none."""

    def be(*, amx: bool = False, packs: Collection[torch.dtype] = BOTH) -> None:
        monkeypatch.setattr("penstock.models.arithmetic.has_fast_products", lambda: amx)
        monkeypatch.setattr("penstock.models.packing.has_fast_products", lambda: amx)
        monkeypatch.setattr("penstock.models.packing.kernels", lambda: None)
        monkeypatch.setattr("penstock.models.packing._onednn_packs", lambda dtype: dtype in packs)

    return be


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[[Work], set[str]]:
    """The names of the ways that a trial takes; each is seen to multiply as its name says."""
    multiplied: list[str] = []
    names: list[str] = []

    def plain(x: Tensor, matrix: Tensor) -> Tensor:
        multiplied.append(str(x.dtype).removeprefix("torch."))
        return x @ matrix

    class Packed:
        def pack(self, matrix: Tensor) -> Tensor:
            return matrix

        def multiply(self, x: Tensor, matrix: Tensor, room: Tensor) -> Tensor:
            multiplied.append(f"{matrix.dtype} packed".removeprefix("torch."))
            return room

    def shortest(ways: Mapping[str, Callable[[], None]]) -> dict[str, float]:
        for name, way in ways.items():
            multiplied.clear()
            way()
            assert set(multiplied) == {name}
            names.append(name)
        return dict.fromkeys(ways, 1.0)

    def find(work: Work) -> set[str]:
        names.clear()
        try_out(work)
        return set(names)

    monkeypatch.setattr("penstock.models.arithmetic.shortest", shortest)
    monkeypatch.setattr("penstock.models.packing.OneDnn", Packed)
    monkeypatch.setattr("penstock.models.arithmetic.product", plain)
    monkeypatch.setattr("torch.mm", plain)
    return find


def layers_of(num_bytes: int, *, packed: bool | None = None) -> Work:
    """An engine's work: as many layers as have so many bytes in float32."""
    work = work_of(LLAMA, rows=4, packed=packed)
    assert work is not None
    return work._replace(layers=num_bytes // (4 * sum(out * into for out, into in work.matrices)))


PLAIN = {"float32", "bfloat16"}
PACKED = {"float32 packed", "bfloat16 packed"}


def test_an_engine_s_products_are_tried_packed_too_where_it_would_try_that(machine: Any, tried: Any) -> None:
    machine()
    assert tried(layers_of(100 << 20)) == PLAIN | PACKED
    assert tried(layers_of(1 << 20)) == PLAIN
    # In bfloat16 the same matrices have half as many bytes.
    assert tried(layers_of(40 << 20)) == PLAIN | {"float32 packed"}
    assert tried(layers_of(3 << 30)) == PLAIN | {"bfloat16 packed"}
    assert tried(layers_of(5 << 30)) == PLAIN


@pytest.mark.parametrize("num_bytes", [1 << 20, 100 << 20, 5 << 30])
def test_an_engine_that_was_asked_to_pack_or_not_to_is_tried_as_asked(num_bytes: int, machine: Any, tried: Any) -> None:
    machine()
    assert tried(layers_of(num_bytes, packed=True)) == PACKED
    assert tried(layers_of(num_bytes, packed=False)) == PLAIN


@pytest.mark.parametrize("packed", [None, True])
def test_what_this_cpu_cannot_pack_is_tried_plain(packed: bool | None, machine: Any, tried: Any) -> None:
    work = layers_of(100 << 20, packed=packed)
    machine(packs=())
    assert tried(work) == PLAIN
    machine(packs=[torch.bfloat16])
    assert tried(work) == {"float32", "bfloat16 packed"} | ({"bfloat16"} if packed is None else set())


@pytest.mark.parametrize("packed", [None, True])
def test_with_amx_bfloat16_is_not_packed(packed: bool | None, machine: Any, tried: Any) -> None:
    machine(amx=True)
    assert tried(layers_of(100 << 20, packed=packed)) == {"float32 packed", "bfloat16"} | (
        {"float32"} if packed is None else set()
    )


@pytest.mark.parametrize("amx", [False, True])
def test_what_trains_is_not_packed(amx: bool, machine: Any, tried: Any) -> None:
    machine(amx=amx)
    # bfloat16 that trains must be summed in float32: by MKL, or not at all.
    assert tried(layers_of(100 << 20)._replace(trains=True)) == (PLAIN if amx else {"float32"})


def test_a_dtype_takes_as_long_as_the_faster_of_its_ways(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setattr("penstock.models.packing.OneDnn.pack", lambda self, matrix: matrix)
    seconds = {"float32": 3.0, "float32 packed": 2.0, "bfloat16": 4.0, "bfloat16 packed": 5.0}
    monkeypatch.setattr("penstock.models.arithmetic.shortest", lambda ways: {name: seconds[name] for name in ways})
    assert try_out(layers_of(100 << 20)) == {"float32": 2.0, "bfloat16": 4.0}
    assert try_out(layers_of(100 << 20, packed=True)) == {"float32": 2.0, "bfloat16": 5.0}
    assert try_out(layers_of(100 << 20, packed=False)) == {"float32": 3.0, "bfloat16": 4.0}


@pytest.mark.parametrize("packed", [None, pytest.param(True, marks=pytest.mark.long_tier), False])
def test_a_trial_on_this_cpu_takes_time_in_each_dtype(packed: bool | None) -> None:
    seconds = try_out(layers_of(100 << 20, packed=packed))
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
@pytest.mark.parametrize("amx", [False, True])
def test_a_trial_multiplies_the_matrices_of_the_model(amx: bool, trains: bool, machine: Any) -> None:
    machine(amx=amx)
    work = work_of(LLAMA, rows=4, trains=trains)
    assert work is not None
    assert work.matrices == ((128, 64), (64, 64), (256, 64), (64, 128), (128, 64))
    seconds = try_out(work)
    assert set(seconds) == ({"float32"} if trains and not amx else {"float32", "bfloat16"})
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
