"""Weights in shared memory: what arrives, what a late reader sees, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import WeightSyncError
from penstock.ports import KeptWeights, LoadedWeights, WeightSource
from penstock.weights import SharedMemoryBuffer, SharedMemoryWeights, StoredWeights, WriterSettings, build_channel

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


class State:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.state = tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.state.items()


@pytest.fixture
def buffer() -> Iterator[SharedMemoryBuffer]:
    buffer = SharedMemoryBuffer(bucket_bytes=1 << 20)
    yield buffer
    buffer.close()


def weights(seed: int, *, size: int = 300_000) -> State:
    generator = torch.Generator().manual_seed(seed)
    return State({f"layer.{i}": torch.randn(size + i, generator=generator) for i in range(4)})


def read(stored: SharedMemoryWeights) -> dict[str, torch.Tensor]:
    with stored.receive() as received:
        assert received.checksum == stored.checksum
        return {name: tensor.clone() for name, tensor in received.tensors()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@settings(max_examples=40)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3), st.booleans()), max_size=8
    ),
    bucket=st.sampled_from([1, 100, 1 << 20]),
)
def test_what_is_read_is_what_was_written(shapes: list[tuple[torch.dtype, list[int], bool]], bucket: int) -> None:
    state = {}
    for index, (dtype, shape, transposed) in enumerate(shapes):
        tensor = torch.randint(0, 100, shape).to(dtype)
        state[f"t{index}"] = tensor.transpose(0, 1) if transposed and tensor.ndim > 1 else tensor
    buffer = SharedMemoryBuffer(bucket_bytes=bucket)
    try:
        stored = buffer.write(State(state))
        travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=StoredWeights)
        assert isinstance(travelled, SharedMemoryWeights)
        assert isinstance(travelled, KeptWeights)
        assert_same(read(travelled), state)
    finally:
        buffer.close()


def test_the_memory_is_used_again_and_every_write_is_a_new_set(buffer: SharedMemoryBuffer) -> None:
    paths = set()
    for seed in range(4):
        source = weights(seed)
        stored = buffer.write(source)
        paths.add((stored.path, Path(stored.path).stat().st_ino))
        assert_same(read(stored), source.state)
    assert len(paths) == 1


def test_weights_stay_readable_until_the_next_are_written(buffer: SharedMemoryBuffer) -> None:
    first = weights(1)
    stored = buffer.write(first)
    assert_same(read(stored), first.state)
    assert_same(read(stored), first.state)
    buffer.write(weights(2))
    with pytest.raises(WeightSyncError, match="checksum"), stored.receive():
        pass


def test_a_reader_in_the_middle_keeps_its_weights_when_new_ones_are_written(buffer: SharedMemoryBuffer) -> None:
    first, second = weights(1), weights(2)
    stored = buffer.write(first)
    with stored.receive() as received:
        later = buffer.write(second)
        assert_same(dict(received.tensors()), first.state)
        assert_same(read(later), second.state)


def test_a_larger_set_fits_after_a_smaller(buffer: SharedMemoryBuffer) -> None:
    for size in (10, 1_000_000, 10):
        source = weights(size, size=size)
        assert_same(read(buffer.write(source)), source.state)


def test_a_changed_byte_is_refused(buffer: SharedMemoryBuffer) -> None:
    stored = buffer.write(weights(1))
    with open(stored.path, "r+b") as memory:  # noqa: PTH123 - a descriptor of /proc
        memory.seek(stored.entries[2].offset + 17)
        byte = memory.read(1)
        memory.seek(-1, os.SEEK_CUR)
        memory.write(bytes([byte[0] ^ 4]))
    with pytest.raises(WeightSyncError, match="checksum"), stored.receive():
        pass


def test_memory_that_is_gone_is_named(buffer: SharedMemoryBuffer) -> None:
    stored = buffer.write(weights(1))
    buffer.close()
    with pytest.raises(WeightSyncError, match="gone"), stored.receive():
        pass
    with pytest.raises(WeightSyncError, match="closed"):
        buffer.write(weights(1))


def test_a_source_that_fails_or_repeats_itself_is_a_failed_sync(buffer: SharedMemoryBuffer) -> None:
    class Broken:
        def tensors(self) -> Iterator[tuple[str, Any]]:
            yield "a", torch.ones(3)
            raise RuntimeError("device lost")

    class Twice:
        def tensors(self) -> Iterator[tuple[str, Any]]:
            yield "a", torch.ones(3)
            yield "a", torch.ones(3)

    for source, said in ((Broken(), "device lost"), (Twice(), "twice")):
        with pytest.raises(WeightSyncError, match=said):
            buffer.write(source)
    assert_same(read(buffer.write(weights(3))), weights(3).state)


def test_no_descriptor_is_left_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def use() -> None:
        buffer = SharedMemoryBuffer()
        for seed in range(3):
            stored = buffer.write(weights(seed, size=1000))
            with stored.receive():
                buffer.write(weights(seed + 10, size=1000))
        buffer.close()

    use()
    before = descriptors()
    for _ in range(5):
        use()
    assert descriptors() <= before + 1  # the reader keeps its last mapping, whose descriptor it may hold


def test_nothing_is_left_of_an_owner_that_was_killed() -> None:
    program = textwrap.dedent("""
        import time, torch
        from penstock.weights import SharedMemoryBuffer

        class State:
            def tensors(self):
                yield "w", torch.ones(1000)

        print(SharedMemoryBuffer().write(State()).path, flush=True)
        time.sleep(1000)
    """)
    before = {path.name for path in Path("/dev/shm").iterdir()}
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        path = owner.stdout.readline().strip()
        assert Path(path).exists()
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    assert not Path(path).exists()
    assert not [name for name in {path.name for path in Path("/dev/shm").iterdir()} - before if "penstock" in name]


class Confirms:
    """As much of an engine as a channel needs."""

    def __init__(self, *, step: int | None = None, checksum: str | None = None, hangs: bool = False) -> None:
        self.step, self.checksum, self.hangs = step, checksum, hangs
        self.served = 0

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights:
        if self.hangs:
            await asyncio.Event().wait()
        assert isinstance(source, SharedMemoryWeights)
        self.served = model_step if self.step is None else self.step
        return LoadedWeights(model_step=model_step, checksum=self.checksum or source.checksum)

    async def model_step(self) -> int:
        return self.served


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Confirms(step=4), "the engine serves 4"),
        (Confirms(checksum="beef"), "received beef"),
        (Confirms(hangs=True), r"no confirmation within 0\.2 s"),
    ],
)
def test_a_sync_that_is_not_confirmed_raises(engine: Any, said: str) -> None:
    async def publish() -> None:
        channel = build_channel(
            weights(1, size=10), engine, WriterSettings(kind="shared_memory", timeout_s=0.2 if engine.hangs else 60.0)
        )
        try:
            with pytest.raises(WeightSyncError, match=said):
                await channel.publish(5)
        finally:
            await channel.close()

    asyncio.run(publish())
