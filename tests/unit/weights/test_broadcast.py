"""Weights through torch.distributed: several receivers, late ones, dead ones, damaged bytes. All on the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from penstock.errors import ConfigError, WeightSyncError
from penstock.weights import StoredWeights
from penstock.weights.broadcast import WeightServer, join_store, receive
from penstock.weights.stored import BroadcastWeights, LentSharedMemory

HERE = "127.0.0.1"


class Weights:
    def __init__(self, seed: int, num_layers: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tensors = {f"layer.{n}": torch.randn(33 + n, 7, generator=generator) for n in range(num_layers)}
        self._tensors["empty"] = torch.empty(0, 7)
        self._tensors["half"] = torch.randn(9, generator=generator).bfloat16()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


@pytest.fixture
def server() -> Iterator[WeightServer]:
    server = WeightServer(HERE, through_memory=False, bucket_bytes=1000, timeout_s=20.0, connect_s=1.0)
    yield server
    server.close()


def _same(received: Iterator[tuple[str, torch.Tensor]], weights: Weights) -> bool:
    sent, found = dict(weights.tensors()), dict(received)
    return sent.keys() == found.keys() and all(torch.equal(sent[name], found[name]) for name in sent)


def test_all_receivers_get_the_bytes_that_were_sent(server: WeightServer) -> None:
    weights = Weights(1)
    sent = server.write(weights, 1)
    # As it reaches an engine's process.
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=StoredWeights)
    with ThreadPoolExecutor(3) as pool:
        received = list(pool.map(receive, [told] * 3))
    assert [each.checksum for each in received] == [sent.checksum] * 3
    assert all(_same(each.tensors(), weights) for each in received)
    server.confirm()


def test_one_that_comes_late_is_sent_what_was_confirmed_and_not_what_is_gone(server: WeightServer) -> None:
    first, second, third = (Weights(seed) for seed in (1, 2, 3))
    served = []
    for step, weights in enumerate((first, second), start=1):
        served.append(server.write(weights, step))
        server.confirm()
    assert _same(receive(served[1]).tensors(), second)
    # A third one that is not confirmed yet: what is served is still there.
    written = server.write(third, 3)
    assert _same(receive(served[1]).tensors(), second)
    assert _same(receive(written).tensors(), third)
    with pytest.raises(WeightSyncError, match="does not have weights"):
        receive(served[0])


def test_on_the_senders_machine_the_memory_is_read_where_it_is() -> None:
    server = WeightServer(HERE)
    weights = Weights(4)
    sent = server.write(weights, 1)
    with sent.receive() as received:
        assert isinstance(received, LentSharedMemory)
        assert _same(received.tensors(), weights)
    elsewhere = msgspec.structs.replace(sent, machine="another one")
    with elsewhere.receive() as received:
        assert not isinstance(received, LentSharedMemory)
        assert _same(received.tensors(), weights)
    server.close()


def test_one_that_asked_and_died_costs_the_others_one_attempt(server: WeightServer) -> None:
    weights = Weights(5)
    sent = server.write(weights, 1)
    store = join_store(HERE, sent.port, 5.0)
    # One draws a ticket and says no more; one asks, and is never seen again.
    store.add("tickets", 1)
    store.set(f"ticket/{store.add('tickets', 1)}", sent.checksum)
    assert _same(receive(sent).tensors(), weights)


def test_bytes_that_changed_on_the_way_are_refused(server: WeightServer) -> None:
    sent = server.write(Weights(6), 1)
    with sent.shared.held() as memory:
        memory[17] ^= 1
    with pytest.raises(WeightSyncError, match="the old ones are kept"):
        receive(sent)


def test_a_sender_that_is_gone_is_said_in_time() -> None:
    server = WeightServer(HERE, through_memory=False, timeout_s=0.5)
    sent: BroadcastWeights = server.write(Weights(7), 1)
    server.close()
    del server
    with pytest.raises(WeightSyncError, match=r"did not arrive within 0\.5 s"):
        receive(sent)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs GPUs"):
        WeightServer(HERE, backend="nccl")
