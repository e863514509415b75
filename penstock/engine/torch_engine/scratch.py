"""Memory for the tables as wide as the vocabulary, kept between steps: taken anew, the kernel would clear megabytes of
pages for every token."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """A float32 table that grows to the largest one asked for. What `take` returned is overwritten by the next."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device=device)

    def take(self, rows: int, columns: int) -> Tensor:
        if self._memory.numel() < rows * columns:
            self._memory = torch.empty(rows * columns, dtype=torch.float32, device=self._memory.device)
        return self._memory[: rows * columns].view(rows, columns)
