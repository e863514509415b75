"""A worker that trains on one thread, and what it holds."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from penstock.learn.batch import TrainAnswer, TrainBatch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.worker import TorchTrainWorker
from penstock.rollout import FloatArray, Group

RandomGroups = Callable[..., list[Group]]


def new_worker(model_dir: Path, **fields: Any) -> TorchTrainWorker:
    return TrainWorkerConfig(**{"lr": 1e-3, **fields}).build(model_dir, total_steps=10, threads=1)


def train(worker: TorchTrainWorker, batch: TrainBatch) -> dict[str, float]:
    return asyncio.run(worker.train(batch)).metrics


def scores_of(worker: TorchTrainWorker, batch: TrainBatch) -> list[FloatArray]:
    """Of every segment, in the batch's order."""
    return [segment for rollout in asyncio.run(worker.score(batch)).values() for segment in rollout]


def state_of(worker: TorchTrainWorker) -> dict[str, torch.Tensor]:
    """Optimiser and schedule, as they are saved."""
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(worker.save(Path(directory)))
        return load_file(Path(directory) / "optimizer.safetensors")


def go_on(first: TorchTrainWorker, second: TorchTrainWorker) -> None:
    """The second goes on from where the first stands."""
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(first.save(Path(directory)))
        asyncio.run(second.load(Path(directory)))


def weights_of(worker: TorchTrainWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.weights.tensors()}


def are_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def with_advantage(batch: TrainBatch, advantage: float) -> TrainBatch:
    def changed(answer: TrainAnswer) -> TrainAnswer:
        return replace(
            answer,
            advantage=advantage,
            segments=[replace(s, advantages=np.full_like(s.advantages, advantage)) for s in answer.segments],
        )

    return replace(batch, groups=[replace(g, answers=[changed(a) for a in g.answers]) for g in batch.groups])
