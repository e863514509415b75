"""Distributions for scripted parts: functions from a random generator to a number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Distribution = Callable[[random.Random], float]


def constant(value: float) -> Distribution:
    return lambda _: value


def uniform(low: float, high: float) -> Distribution:
    return lambda rng: rng.uniform(low, high)


def long_tail(median: float, p99: float) -> Distribution:
    """Log-normal: what lengths of answers and times of judges look like."""
    mu = math.log(median)
    sigma = (math.log(p99) - mu) / 2.3263
    return lambda rng: rng.lognormvariate(mu, sigma)
