"""Weights as files: complete or not there, checked when read, and the disk does not fill up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.errors import StorageError, WeightSyncError
from penstock.ports import LoadedWeights, WeightSource
from penstock.weights import DiskWeights, InProcessChannel, StoredWeights, WriterSettings, build_channel
from penstock.weights.disk import write_weights


class State:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.state = tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.state.items()


def weights(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    state = {f"layer.{i}": torch.randn(50, 10 + i, generator=generator) for i in range(6)}
    state["half"] = torch.randn(7, generator=generator).bfloat16()
    state["tied"] = state["layer.0"]
    state["transposed"] = state["layer.1"].T
    return State(state)


class Loads:
    """Reads what it is told to, as an engine's process does."""

    def __init__(self) -> None:
        self.step = 0
        self.state: dict[str, torch.Tensor] = {}
        self.sources: list[DiskWeights] = []

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights:
        assert isinstance(source, DiskWeights)
        self.sources.append(source)
        with source.receive() as received:
            self.state = {name: tensor.clone() for name, tensor in received.tensors()}
            self.step = model_step
            return LoadedWeights(model_step=model_step, checksum=received.checksum)

    async def model_step(self) -> int:
        return self.step


def test_files_carry_the_weights_and_the_last_two_sets_stay(tmp_path: Path) -> None:
    engine: Any = Loads()
    directory = tmp_path / "weights"
    (directory / "model-step-9.part").mkdir(parents=True)

    async def publish() -> None:
        bound = State({})
        channel = build_channel(
            bound, engine, WriterSettings(kind="disk", directory=str(directory), max_file_bytes=5000)
        )
        for step in range(1, 5):
            bound.state = weights(step).state
            published = await channel.publish(step)
            assert engine.step == published.model_step == step
            for name, tensor in weights(step).state.items():
                assert torch.equal(engine.state[name], tensor), name
        await channel.close()

    asyncio.run(publish())
    assert sorted(path.name for path in directory.iterdir()) == ["model-step-3", "model-step-4"]
    assert len(engine.sources[-1].files) > 1
    with engine.sources[-2].receive() as received:
        assert dict(received.tensors()).keys() == weights().state.keys()


def test_the_record_travels(tmp_path: Path) -> None:
    stored = write_weights(weights(), tmp_path / "w")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=StoredWeights) == stored


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "swap"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    stored = write_weights(weights(), tmp_path / "w", max_file_bytes=5000)
    file = Path(stored.path) / stored.files[0]
    content = file.read_bytes()
    if damage == "flip":
        file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif damage == "truncate":
        file.write_bytes(content[:-3])
    elif damage == "remove":
        file.unlink()
    else:
        file.write_bytes((Path(stored.path) / stored.files[1]).read_bytes())
    with pytest.raises(WeightSyncError), stored.receive():
        pass


def test_a_set_that_could_not_be_written_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file"):
        write_weights(weights(), tmp_path / "file" / "w")

    class Broken:
        def tensors(self) -> Iterator[tuple[str, Any]]:
            yield "a", torch.ones(3)
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        write_weights(Broken(), tmp_path / "w")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_channel_inside_a_process_asks_what_is_served() -> None:
    class Engine:
        def __init__(self, serves: int | None) -> None:
            self.serves = serves
            self.step = 0

        async def load_weights(self, source: WeightSource, model_step: int) -> None:
            if self.serves is None:
                await asyncio.Event().wait()
            self.step = model_step + (self.serves or 0)

        async def model_step(self) -> int:
            return self.step

    async def publish(serves: int | None) -> None:
        engine: Any = Engine(serves)
        published = await InProcessChannel(weights(), engine, timeout_s=0.05 if serves is None else 60).publish(3)
        assert (published.model_step, published.num_bytes > 0) == (3, True)

    asyncio.run(publish(0))
    with pytest.raises(WeightSyncError, match="serves 2"):
        asyncio.run(publish(-1))
    with pytest.raises(WeightSyncError, match="no confirmation"):
        asyncio.run(publish(None))
