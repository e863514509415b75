"""After a sync an engine computes what the trainer computes, adapter and all, however it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_batches import Given, make_batch, scored_by, scored_by_trainer, trained_worker

from penstock.engine import EmbeddedEngineConfig
from penstock.errors import WeightSyncError
from penstock.learn import LoRAConfig
from penstock.learn.worker import TorchTrainWorker
from penstock.models import load_tokenizer
from penstock.ports import Engine, WeightChannel
from penstock.weights import WriterSettings, build_channel
from penstock.weights.adapter import on_base
from penstock.weights.in_process import InProcessChannel


@pytest.fixture(scope="module")
def tiny_dir(make_known: Callable[[str], Path]) -> Path:
    return make_known("tiny")


def channel_of(kind: str, worker: TorchTrainWorker, engine: Engine, directory: Path) -> WeightChannel:
    if kind == "in_process":
        return InProcessChannel(worker.weights, engine)
    if kind == "disk":
        return build_channel(worker.weights, engine, WriterSettings(kind="disk", directory=str(directory)))
    return build_channel(worker.weights, engine, WriterSettings(kind="shared_memory"))


@pytest.mark.parametrize("sync", ["merged", "adapter"])
@pytest.mark.parametrize(
    ("channel", "fields", "engine_fields", "tolerance"),
    [
        ("in_process", {}, {}, 1e-4),
        ("in_process", {"fused": False}, {"fused": False}, 1e-4),
        ("in_process", {"dtype": "bfloat16"}, {"dtype": "bfloat16"}, 0.05),
        ("disk", {}, {}, 1e-4),
        ("shared_memory", {}, {"process": True}, 1e-4),
    ],
)
def test_after_a_sync_the_engine_scores_as_the_trainer_and_not_as_the_base(
    tiny_dir: Path,
    tmp_path: Path,
    sync: Any,
    channel: str,
    fields: dict[str, Any],
    engine_fields: dict[str, Any],
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without AMX bfloat16 would be torch.autocast in the trainer, which also rounds what lies between two products.
    monkeypatch.setattr("penstock.learn.load.has_fast_products", lambda: True)
    worker, batch = trained_worker(tiny_dir, LoRAConfig(rank=4, sync=sync), **fields)
    trained = scored_by_trainer(worker, batch)
    engine = EmbeddedEngineConfig(**engine_fields).build(str(tiny_dir), load_tokenizer(tiny_dir), threads=1)

    async def sync_and_score() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
        base = await scored_by(engine, batch)
        published = channel_of(channel, worker, engine, tmp_path)
        sent = await published.publish(1)
        again = await published.publish(2)
        after = await scored_by(engine, batch)
        assert again.num_bytes == sent.num_bytes and await engine.model_step() == 2
        await published.close()
        await engine.close()
        return base, after, sent.num_bytes

    base, after, num_bytes = asyncio.run(sync_and_score())
    np.testing.assert_allclose(after, trained, atol=tolerance)
    assert np.abs(base - trained).max() > max(0.3, 3 * tolerance)
    whole = sum(tensor.nbytes for _, tensor in worker.model.state_dict().items())
    assert (num_bytes < whole / 3) == (sync == "adapter")


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"model.layers.0.self_attn.q_proj.lora_A": torch.zeros(4, 64)}, "is a pair"),
        ({"nowhere.lora_A": torch.zeros(4, 64), "nowhere.lora_B": torch.zeros(64, 4)}, "has no nowhere.weight"),
        (
            {
                "model.layers.0.self_attn.q_proj.lora_A": torch.zeros(4, 3),
                "model.layers.0.self_attn.q_proj.lora_B": torch.zeros(64, 4),
            },
            r"is \(64, 3\), not \(64, 64\)",
        ),
        ({"a.lora_A": torch.zeros(1, 1), "model.norm.weight": torch.zeros(64)}, "is a pair"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_and_the_old_weights_are_kept(
    tiny_dir: Path, tensors: dict[str, torch.Tensor], problem: str
) -> None:
    engine = EmbeddedEngineConfig().build(str(tiny_dir), load_tokenizer(tiny_dir), threads=1)
    batch = make_batch(1)

    async def refuse() -> None:
        before = await scored_by(engine, batch)
        with pytest.raises(WeightSyncError, match=problem):
            await engine.load_weights(Given(tensors), 1)
        assert await engine.model_step() == 0
        assert np.array_equal(await scored_by(engine, batch), before)
        await engine.close()

    asyncio.run(refuse())


def test_other_weights_are_taken_as_they_are(tiny_dir: Path) -> None:
    source = Given({"model.norm.weight": torch.zeros(64)})
    assert on_base(source, tiny_dir) is source
