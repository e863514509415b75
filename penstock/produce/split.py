"""How a batch is divided among tasks: a pure function of weights, batch size and step.

Webster's method over all groups since step 1: the n-th goes to the task with the largest weight / (2 * given + 1).
It is house-monotone, so a step's share is the difference of two totals and never negative; every total stays within a
group or so of its exact share, so a tiny weight is served too, just rarely.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from fractions import Fraction


def split_batch(weights: Mapping[str, float], batch_size: int, train_step: int) -> dict[str, int]:
    """Groups per task for 1-based `train_step`; sums to `batch_size`."""
    if len(weights) == 1:
        return dict.fromkeys(weights, batch_size)
    before = _totals(weights, batch_size * (train_step - 1))
    after = _totals(weights, batch_size * train_step)
    return {task: after[task] - before[task] for task in weights}


def _totals(weights: Mapping[str, float], n: int) -> dict[str, int]:
    exact = {task: Fraction(weight) for task, weight in weights.items()}
    whole = sum(exact.values())
    # Start from the allocation of a smaller house, which is below the final one everywhere, then give out the rest.
    scale = max(Fraction(0), Fraction(n - len(exact)) / whole)
    totals = {task: _round_half_down(scale * weight) for task, weight in exact.items()}
    order = list(exact)
    queue = [
        (-exact[task] / (2 * totals[task] + 1), index, task) for index, task in enumerate(order) if exact[task] > 0
    ]
    heapq.heapify(queue)
    for _ in range(n - sum(totals.values())):
        _, index, task = heapq.heappop(queue)
        totals[task] += 1
        heapq.heappush(queue, (-exact[task] / (2 * totals[task] + 1), index, task))
    return totals


def _round_half_down(value: Fraction) -> int:
    return -((1 - 2 * value) // 2)
