"""What one train step says about itself, gathered over its micro-batches and updates, and over its ranks."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from torch import Tensor

from penstock.learn.losses import LossTokens
from penstock.learn.mismatch import Mismatch
from penstock.learn.pack import MicroBatch
from penstock.ports import TrainOutcome
from penstock.rollout import FloatArray


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part in a step. Those of all ranks make its outcome."""

    tokens: int
    cells: int
    used: int
    micro_batches: int
    losses: list[float]
    """Of each update; over all ranks, like the norms."""
    norms: list[float]
    sums: dict[str, float]
    """Over this rank's tokens."""
    mismatch: Mismatch
    """Of the engine and the trainer."""
    moved: Mismatch
    """Of the old policy and the current one; nothing where they are the same."""
    seconds: dict[str, float]
    settings: dict[str, float]
    """Metrics that are the same on every rank."""
    logprobs: dict[str, list[FloatArray]]
    """Of this rank's rollouts, one array per segment."""


def outcome(reports: Sequence[StepReport]) -> TrainOutcome:
    """Of the step that these ranks, which are all there are, made together."""
    first, tokens = reports[0], sum(report.tokens for report in reports)
    sums: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for report in reports:
        sums.update(report.sums)
        # The step waits for the slowest.
        seconds |= {part: max(spent, seconds.get(part, 0.0)) for part, spent in report.seconds.items()}
    metrics = {
        **(_of_updates(reports, first) if first.losses else {}),
        "tokens": float(tokens),
        "micro_batches": float(sum(report.micro_batches for report in reports)),
        **{name: total / tokens for name, total in sums.items()},
        **{f"seconds/{part}": spent for part, spent in seconds.items()},
        **first.settings,
        "tokens_per_s": tokens / seconds["total"],
    }
    logprobs = {rollout: segments for report in reports for rollout, segments in report.logprobs.items()}
    return TrainOutcome(metrics=metrics, logprobs=logprobs)


def _of_updates(reports: Sequence[StepReport], first: StepReport) -> dict[str, float]:
    """What there is to say where anything was trained."""
    return {
        "loss": float(np.mean(first.losses)),
        "grad_norm": float(np.mean(first.norms)),
        "padding_share": 1 - sum(report.used for report in reports) / sum(report.cells for report in reports),
        **sum((report.mismatch for report in reports), Mismatch()).metrics(),
        **sum((report.moved for report in reports), Mismatch()).extremes(),
    }


class StepMetrics:
    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._tokens = 0
        self._cells = 0
        self._used = 0
        self._micro_batches = 0
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._sums: dict[str, float] = defaultdict(float)
        self._seconds: dict[str, float] = defaultdict(float)
        self._mismatch = Mismatch()
        self._moved = Mismatch()

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - started

    def add(self, micro_batch: MicroBatch, tokens: LossTokens, per_token: dict[str, Tensor]) -> None:
        self._tokens += len(micro_batch.targets)
        self._cells += micro_batch.num_cells
        self._used += micro_batch.num_used
        self._micro_batches += 1
        for name, values in per_token.items():
            self._sums[name] += values.double().sum().item()
        # After an update the trainer has moved on; what is left then is not a mismatch.
        if not self._losses:
            self._mismatch.add(tokens.trainer_logprobs, tokens.engine_logprobs)
        if not tokens.on_policy:
            self._moved.add(tokens.logprobs, tokens.old_logprobs)

    def end_update(self, loss: float, norm: float) -> None:
        self._losses.append(loss)
        self._norms.append(norm)

    def report(self, settings: dict[str, float], logprobs: dict[str, list[FloatArray]]) -> StepReport:
        return StepReport(
            tokens=self._tokens,
            cells=self._cells,
            used=self._used,
            micro_batches=self._micro_batches,
            losses=self._losses,
            norms=self._norms,
            sums=dict(self._sums),
            mismatch=self._mismatch,
            moved=self._moved,
            seconds={**self._seconds, "total": time.perf_counter() - self._started},
            settings=settings,
            logprobs=logprobs,
        )
