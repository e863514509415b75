"""All engines of a run from one configuration, with the channel that fits them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_contract import CharacterTokenizer

from penstock.engine import EmbeddedEngineConfig, EngineConfig, EnginesConfig, RolloutControllerConfig
from penstock.errors import ConfigError, WeightSyncError
from penstock.ports import Engine, Tokenizer
from penstock.testing import EngineScript, ScriptedEngine, run_virtual
from penstock.weights import InProcessChannel
from penstock.weights.channel import OwnWeights, StoredChannel


class ScriptedEngineConfig(EngineConfig):
    def build(
        self, model_dir: str, tokenizer: Tokenizer, *, deterministic: bool = False, threads: int | None = None
    ) -> Engine:
        return ScriptedEngine(EngineScript(slots=self.max_running))


class NoWeights:
    def tensors(self) -> Any:
        return iter(())


def test_an_engine_that_can_is_told_how_many_idle_cores_it_may_take(tmp_path: Path) -> None:
    setup = EmbeddedEngineConfig(process=True).setup(
        str(tmp_path), CharacterTokenizer(), deterministic=False, threads=1, most_threads=4
    )
    assert (setup.threads, setup.most_threads) == (1, 4)

    async def main() -> None:
        # One of a user's own, which knows nothing of it, is built all the same.
        controller = EnginesConfig(engine=ScriptedEngineConfig()).build("model", CharacterTokenizer(), most_threads=4)
        await controller.close()

    run_virtual(main())


@pytest.mark.parametrize("num_engines", [1, 3])
def test_engines_are_always_behind_a_controller_which_says_how_many_are_active(num_engines: int) -> None:
    async def main() -> None:
        config = EnginesConfig(engine=ScriptedEngineConfig(process=num_engines > 1), num_engines=num_engines)
        controller = config.build("model", None)  # type: ignore[arg-type]
        await controller.check_health()
        assert (await controller.stats()).engines == num_engines
        await controller.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("fields", "writer"),
    [
        ({}, ""),
        ({"channel": "in_process"}, ""),
        ({"engine": EmbeddedEngineConfig(process=True)}, "SharedMemoryWriter"),
        ({"engine": EmbeddedEngineConfig(process=True), "channel": "shared_memory"}, "SharedMemoryWriter"),
        ({"engine": EmbeddedEngineConfig(process=True), "channel": "disk"}, "DiskWriter"),
        ({"channel": "disk"}, "DiskWriter"),
    ],
)
def test_the_channel_fits_the_engines(fields: dict[str, Any], writer: str, tmp_path: Path) -> None:
    config = EnginesConfig(**fields)
    config.check()
    channel = config.build_channel(NoWeights(), ScriptedEngine(), run_dir=tmp_path)
    if not writer:
        assert isinstance(channel, InProcessChannel)
        return
    assert isinstance(channel, StoredChannel) and isinstance(channel._store, OwnWeights)
    assert type(channel._store._writer).__name__ == writer


def test_the_disk_channel_writes_into_the_run_or_where_it_is_told(tmp_path: Path) -> None:
    async def publish(config: EnginesConfig) -> None:
        controller = config.build("model", None)  # type: ignore[arg-type]
        channel = config.build_channel(NoWeights(), controller, run_dir=tmp_path / "run")
        with pytest.raises(WeightSyncError, match="nobody summed up"):  # a scripted engine reads nothing
            await channel.publish(1)
        await controller.close()

    asyncio.run(publish(EnginesConfig(engine=ScriptedEngineConfig(), channel="disk")))
    assert (tmp_path / "run" / "weights" / "model-step-1").is_dir()
    shared = tmp_path / "shared"
    asyncio.run(publish(EnginesConfig(engine=ScriptedEngineConfig(), channel="disk", weights_dir=str(shared))))
    assert (shared / "model-step-1").is_dir()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_engines": 2}, "several engines need engine.process=True"),
        ({"channel": "in_process", "engine": EmbeddedEngineConfig(process=True)}, "cannot read the trainer's memory"),
        ({"channel": "shared_memory"}, "needs no copy"),
        ({"weights_dir": "/shared"}, "only 'disk' writes there"),
        ({"controller": RolloutControllerConfig(max_requests_per_engine=65)}, "may not exceed the second"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EnginesConfig(**fields).check()
