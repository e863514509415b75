"""A trainer whose adapter has moved away from its base, and what an engine thinks of the tokens it trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.learn import LoRAConfig, TrainWorkerConfig
from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.worker import TorchTrainWorker
from penstock.ports import Engine
from penstock.rollout import Prompt, RolloutState, Status, Tokens, Verdict, linear, pack_ids


class Given:
    """A `WeightSource` of exactly these."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def make_batch(seed: int) -> TrainBatch:
    """Two groups of three answers over a vocabulary of 90."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(2):
        prompt = Prompt(ids=pack_ids(rng.integers(3, 90, 6).tolist()))
        groups.append(
            [
                RolloutState(
                    prompt=prompt,
                    group_id=f"g{number}",
                    rollout_id=f"g{number}/{index}",
                    segments=linear(Tokens().append(rng.integers(3, 90, 7).tolist(), [-2.0] * 7, model_step=0)),
                    reward=Verdict(float(index)),
                    status=Status.COMPLETED,
                )
                for index in range(3)
            ]
        )
    return prepare_batch(groups, train_step=1)


def trained_worker(directory: Path, lora: LoRAConfig, **fields: Any) -> tuple[TorchTrainWorker, TrainBatch]:
    worker = TrainWorkerConfig(lr=3e-2, lora=lora, **fields).build(directory, total_steps=10, threads=1)
    batch = make_batch(1)
    for _ in range(3):
        asyncio.run(worker.train(batch))
    return worker, batch


def scored_by_trainer(worker: TorchTrainWorker, batch: TrainBatch) -> np.ndarray[Any, Any]:
    return np.concatenate([s for rollout in asyncio.run(worker.score(batch)).values() for s in rollout])


async def scored_by(engine: Engine, batch: TrainBatch) -> np.ndarray[Any, Any]:
    found = []
    for group in batch.groups:
        for answer in group.answers:
            ids = np.concatenate([group.prompt_ids, answer.segments[0].ids])
            scores = np.frombuffer(await engine.score(pack_ids(ids)), np.float32)
            found.append(scores[len(group.prompt_ids) - 1 :])
    return np.concatenate(found)
