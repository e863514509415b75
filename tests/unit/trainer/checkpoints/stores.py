"""Stores of checkpoints that are known bit for bit by their step and version."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

from penstock.trainer.checkpoints import Checkpoint, CheckpointStore
from penstock.trainer.files import Files
from penstock.unbuffered import FileSum


def tensors_of(step: int, version: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + version)
    weights = {"w": torch.randn(16, 3, generator=generator), "b": torch.randn(3, generator=generator).bfloat16()}
    moments = {"exp_avg.w": torch.randn(16, 3, generator=generator), "steps_done": torch.tensor(step)}
    return {"model": weights, "optimizer": moments, "rng": {"cpu": torch.arange(40, dtype=torch.uint8) + step}}


def state_of(step: int, version: int = 0) -> dict[str, Any]:
    return {"step": step, "version": version, "ledger": 2**70 + step, "summary": {"accuracy": 0.1 * step, "x": None}}


def config_of(step: int) -> dict[str, Any]:
    return {"class": "T", "seed": step, "train": {"lr": 1e-6}}


class Store(CheckpointStore):
    """Remembers its files, so that what is written into a draft goes the same way as the rest."""

    def __init__(self, directory: Path, *, keep: int = 2, files: Files | None = None) -> None:
        self.files = files or Files()
        super().__init__(directory, keep=keep, files=self.files)


def save(store: Store, step: int, version: int = 0) -> Path:
    return asyncio.run(saving(store, step, version, tensors_of(step, version)))


def saving(
    store: Store, step: int, version: int, given: dict[str, dict[str, torch.Tensor]]
) -> Coroutine[Any, Any, Path]:
    """Random numbers as the caller's own tensors, the others as files of somebody who fills the draft."""

    async def fill(draft: Path) -> dict[str, FileSum]:
        names = ("model.safetensors", "optimizer.safetensors")
        return {name: store.files.write_tensors(draft / name, given[name.split(".")[0]]) for name in names}

    rng = {"rng": given["rng"]}
    return store.save(step, fill=fill, tensors=rng, state=state_of(step, version), config=config_of(step))


def holds(checkpoint: Checkpoint, step: int, version: int = 0) -> bool:
    """Whether it is exactly what `save` was given, bit for bit."""
    given = tensors_of(step, version)
    loaded = {name: checkpoint.tensors(name) for name in checkpoint.tensor_names}
    return (
        (checkpoint.step, checkpoint.state, checkpoint.config) == (step, state_of(step, version), config_of(step))
        and loaded.keys() == given.keys()
        and all(loaded[name].keys() == given[name].keys() for name in given)
        and all(
            torch.equal(loaded[n][k], t) and loaded[n][k].dtype == t.dtype for n in given for k, t in given[n].items()
        )
    )


class UnflushedFiles(Files):
    """Without the waiting: these tests do not cut the power."""

    def flush(self, path: Path) -> None:
        assert path.exists()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
