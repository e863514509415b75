"""What a learner was at one moment, in memory of its own: it is written while training goes on.

A snapshot for a checkpoint is as large as the weights and the optimiser together, one for an export alone as large as
the weights. It is there until it is written.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from penstock.learn.state import write_state
from penstock.unbuffered import FileSum

ALIGNMENT = 64


class Snapshot:
    """Its methods block, and may run in any thread."""

    def __init__(
        self, weights: dict[str, Tensor], optimizer: dict[str, Tensor], export: Callable[[Path], None]
    ) -> None:
        """`export` writes the weights in Hugging Face format, from copies too."""
        self._weights = weights
        self._optimizer = optimizer
        self._export = export

    def save(self, directory: Path) -> dict[str, FileSum]:
        """As the learner's own, then. Raises StorageError."""
        return write_state(directory, self._weights, self._optimizer, changing=False)

    def save_hf(self, directory: Path) -> None:
        """As the learner's own, then. Raises StorageError."""
        self._export(directory)


def copied(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of tensors, in this machine's memory."""
    taken = [(name, tensor.detach()) for name, tensor in tensors]
    room = _Room(sum(_rounded(tensor.nbytes) for _, tensor in taken))
    return {name: room.place(tensor) for name, tensor in taken}


class _Room:
    """One piece of fresh memory, which the system has back when the last tensor in it is gone."""

    def __init__(self, num_bytes: int) -> None:
        # Private: pages that could be shared take longer to be made.
        self._memory = mmap.mmap(-1, max(num_bytes, ALIGNMENT), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used = 0

    def place(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor.cpu().clone()
        copy = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += _rounded(tensor.nbytes)
        return copy.view(tensor.shape).copy_(tensor)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
