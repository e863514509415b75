"""How the losses of tokens become one number: over the whole update, whatever the micro-batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.learn.losses.base import LossConfig


def answer_weights(num_trained: npt.NDArray[np.int64], config: LossConfig) -> npt.NDArray[np.float64]:
    """What each token of an answer counts in the loss, from the trained tokens of every answer of the update.

    An answer without trained tokens has no mean, so `sequence-mean` leaves it out; `constant` divides by all answers.
    """
    counts = num_trained.astype(np.float64)
    if config.aggregation == "token-mean":
        return np.full(len(counts), 1.0 / counts.sum())
    if config.aggregation == "sequence-mean":
        return 1.0 / (np.maximum(counts, 1.0) * np.count_nonzero(counts))
    if config.constant_length is None:
        raise ConfigError("loss.aggregation is 'constant'; it needs a constant_length")
    return np.full(len(counts), 1.0 / (len(counts) * config.constant_length))
