"""From end to end: what the engines received is what was sent, also through the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine import RolloutControllerConfig
from penstock.engine.controller import RolloutController
from penstock.errors import WeightSyncError
from penstock.ports import LoadedWeights, WeightChannel
from penstock.testing import ScriptedEngine
from penstock.weights import DiskWeights, SharedMemoryWeights, WriterSettings, build_channel
from penstock.weights.digest import checksum, tensor_bytes, with_pool
from penstock.weights.stored import joined_checksum, tensors_checksum


class Weights:
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.arange(1000, dtype=torch.float32)
        yield "b", torch.ones(7, 3)


class Receiver(ScriptedEngine):
    """Sums up what reached it, which may not be what was sent."""

    def __init__(self, *, flips: bool = False, silent: bool = False) -> None:
        super().__init__()
        self.flips, self.silent = flips, silent

    async def load_weights(self, source: Any, model_step: int) -> LoadedWeights | None:
        await super().load_weights(source, model_step)
        if self.silent:
            return None
        tensors = {name: tensor.clone() for name, tensor in source.tensors()}
        if self.flips:
            tensor_bytes(tensors["a"])[1234] ^= 1
        if isinstance(source, DiskWeights):
            received = joined_checksum(with_pool(lambda pool: [tensors_checksum(tensors, pool)]))
        else:
            assert isinstance(source, SharedMemoryWeights)
            entries = [(entry, tensor_bytes(tensors[entry.name])) for entry in source.entries]
            received = with_pool(lambda pool: checksum(entries, pool))
        return LoadedWeights(model_step=model_step, checksum=received)


Test = Callable[[RolloutController, WeightChannel], Coroutine[Any, Any, None]]


def play(way: str, directory: Path, engines: dict[str, Receiver], test: Test) -> None:
    async def main() -> None:
        controller = RolloutControllerConfig().build(engines)
        channel: WeightChannel
        if way == "disk":
            channel = build_channel(Weights(), controller, WriterSettings(kind="disk", directory=str(directory)))
        else:
            channel = build_channel(Weights(), controller, WriterSettings(kind="shared_memory"))
        try:
            await controller.check_health()
            await test(controller, channel)
        finally:
            await channel.close()
            await controller.close()

    asyncio.run(main())


@pytest.mark.parametrize("way", ["shared_memory", "disk"])
def test_an_engine_that_received_a_flipped_byte_is_fenced_and_the_sync_holds(way: str, tmp_path: Path) -> None:
    async def test(controller: RolloutController, channel: WeightChannel) -> None:
        assert (await channel.publish(1)).model_step == await controller.model_step() == 1
        assert (await controller.stats()).engines == 1

    play(way, tmp_path, {"good": Receiver(), "bad": Receiver(flips=True)}, test)


@pytest.mark.parametrize("way", ["shared_memory", "disk"])
def test_weights_that_only_a_flipped_byte_arrived_of_are_not_published(way: str, tmp_path: Path) -> None:
    async def test(controller: RolloutController, channel: WeightChannel) -> None:
        with pytest.raises(WeightSyncError, match=r"no engine confirmed them\. only: .*received"):
            await channel.publish(1)
        assert await controller.model_step() == 0

    play(way, tmp_path, {"only": Receiver(flips=True)}, test)


@pytest.mark.parametrize("way", ["shared_memory", "disk"])
def test_bytes_that_no_engine_summed_up_are_not_taken_as_received(way: str, tmp_path: Path) -> None:
    async def test(controller: RolloutController, channel: WeightChannel) -> None:
        with pytest.raises(WeightSyncError, match="nobody summed up"):
            await channel.publish(1)

    play(way, tmp_path, {"only": Receiver(silent=True)}, test)
