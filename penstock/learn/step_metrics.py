"""What one train step says about itself, gathered over its micro-batches and updates."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from penstock.learn.losses import LossTokens, Mismatch
from penstock.learn.pack import MicroBatch


class StepMetrics:
    def __init__(self) -> None:
        self.tokens = 0
        self._cells = 0
        self._used = 0
        self._micro_batches = 0
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._sums: dict[str, float] = defaultdict(float)
        self._seconds: dict[str, float] = defaultdict(float)
        self._mismatch = Mismatch()

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - started

    def add(self, micro_batch: MicroBatch, tokens: LossTokens, per_token: dict[str, Tensor]) -> None:
        self.tokens += len(micro_batch.targets)
        self._cells += micro_batch.num_cells
        self._used += micro_batch.num_used
        self._micro_batches += 1
        for name, values in per_token.items():
            self._sums[name] += values.double().sum().item()
        # After an update the trainer has moved on; what is left then is not a mismatch.
        if not self._losses:
            self._mismatch.add(tokens.logprobs, tokens.engine_logprobs)

    def end_update(self, loss: float, norm: float) -> None:
        self._losses.append(loss)
        self._norms.append(norm)

    def metrics(self) -> dict[str, float]:
        return {
            "loss": float(np.mean(self._losses)),
            "grad_norm": float(np.mean(self._norms)),
            "tokens": float(self.tokens),
            "micro_batches": float(self._micro_batches),
            "padding_share": 1 - self._used / self._cells,
            **{name: total / self.tokens for name, total in self._sums.items()},
            **self._mismatch.metrics(),
            **{f"seconds/{part}": seconds for part, seconds in self._seconds.items()},
        }
