"""How new weights reach the engine's tensors: copied, or used in the shared memory where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.torch_engine.weights import EngineWeights
from penstock.errors import WeightSyncError
from penstock.models.rounding import rounded
from penstock.weights import SharedMemoryBuffer, SharedMemoryWeights

SHAPES = {"q": (32, 16), "k": (16, 16), "v": (16, 16), "norm": (16,)}


class State:
    def __init__(self, seed: int, **changed: Tensor) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} | changed

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.state.items()


class Only:
    def __init__(self, **tensors: Tensor) -> None:
        self.state = tensors

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.state.items()


class Model:
    def __init__(self, dtype: torch.dtype = torch.float32, *, order: str = "qkv") -> None:
        self.qkv = torch.zeros(64, 16, dtype=dtype)
        self.norm = torch.zeros(16)
        self.order = order
        self.weights = EngineWeights()
        self.weights.add(self.qkv, {name: torch.Size(SHAPES[name]) for name in order})
        self.weights.add(self.norm, {"norm": torch.Size(SHAPES["norm"])})

    def holds(self, source: State) -> bool:
        joined = torch.cat([rounded(source.state[name], self.qkv.dtype) for name in self.order])
        return torch.equal(self.qkv, joined) and torch.equal(self.norm, source.state["norm"])

    def receive(self, stored: SharedMemoryWeights) -> None:
        with stored.receive() as received:
            self.weights.load(received)


@pytest.fixture
def buffer() -> Iterator[SharedMemoryBuffer]:
    buffer = SharedMemoryBuffer()
    yield buffer
    buffer.close()


def inode(stored: SharedMemoryWeights) -> int:
    return Path(stored.path).stat().st_ino


def test_lent_weights_are_used_where_they_lie(buffer: SharedMemoryBuffer) -> None:
    model, stored = Model(), buffer.write(State(1))
    own = model.qkv.data_ptr()
    with stored.receive() as received:
        model.weights.load(received)
        q = dict(received.tensors())["q"]
        assert model.qkv.data_ptr() == q.data_ptr() != own
    assert model.holds(State(1))


def test_what_is_in_use_is_never_written_over(buffer: SharedMemoryBuffer) -> None:
    model, first = Model(), buffer.write(State(1))
    model.receive(first)
    in_use = inode(first)
    # Not confirmed: another engine refused them, say. The next ones come twice.
    for seed in (2, 3):
        assert inode(buffer.write(State(seed))) != in_use
        assert model.holds(State(1))


def test_two_copies_in_turn_are_enough_for_any_number_of_syncs(buffer: SharedMemoryBuffer) -> None:
    models, used = [Model(), Model()], set()
    for seed in range(6):
        stored = buffer.write(State(seed))
        for model in models:
            model.receive(stored)
        buffer.confirm()
        used.add(inode(stored))
        assert all(model.holds(State(seed)) for model in models)
    assert len(used) == 2


@pytest.mark.parametrize("model", [Model(torch.bfloat16), Model(order="kqv")], ids=["another dtype", "another order"])
def test_weights_that_lie_otherwise_are_copied(buffer: SharedMemoryBuffer, model: Model) -> None:
    own = model.qkv.data_ptr()
    for seed in range(3):
        model.receive(buffer.write(State(seed)))
        buffer.confirm()
    assert model.holds(State(2))
    assert model.qkv.data_ptr() == own


def test_a_tensor_that_lies_in_another_order_is_filled_in_that_order(buffer: SharedMemoryBuffer) -> None:
    turned, given = torch.zeros(16, 32).t(), torch.randn(32, 16)
    weights = EngineWeights()
    weights.add(turned, {"q": given.shape})
    for factor in (1, 2):
        with buffer.write(Only(q=given * factor)).receive() as received:
            weights.load(received)
        assert torch.equal(turned, given * factor)


def test_after_a_loan_the_engine_has_memory_of_its_own_again(buffer: SharedMemoryBuffer) -> None:
    model, stored = Model(), buffer.write(State(1))
    model.receive(stored)
    source = State(2)
    model.weights.load(source)
    assert model.holds(State(2))
    assert model.qkv.data_ptr() != source.state["q"].data_ptr()
    # Given back: the owner writes there again.
    assert inode(buffer.write(State(3))) == inode(stored)
    assert model.holds(State(2))


def test_weights_that_were_given_back_are_refused(buffer: SharedMemoryBuffer) -> None:
    """A load that was cancelled while it waited for the engine's thread."""
    model = Model()
    model.receive(buffer.write(State(1)))
    buffer.confirm()
    with buffer.write(State(2)).receive() as late:
        pass
    with pytest.raises(WeightSyncError, match="given back before they were loaded"):
        model.weights.load(late)
    buffer.write(State(3))
    assert model.holds(State(1))


def test_stored_weights_are_received_by_an_engine_of_this_process(buffer: SharedMemoryBuffer) -> None:
    model = Model()
    model.weights.load(buffer.write(State(1)))
    buffer.write(State(2))
    assert model.holds(State(1))


def test_refused_weights_change_nothing_and_are_not_kept(buffer: SharedMemoryBuffer) -> None:
    model = Model()
    model.receive(buffer.write(State(1)))
    buffer.confirm()
    refused = buffer.write(State(2, k=torch.zeros(3, 16)))
    with pytest.raises(WeightSyncError, match=r"k has shape \(3, 16\); the model needs \(16, 16\)"):
        model.receive(refused)
    assert model.holds(State(1))
    assert inode(buffer.write(State(3))) == inode(refused)
