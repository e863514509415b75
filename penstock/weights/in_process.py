"""Weights for an engine in the trainer's own process: the engine copies them into its own layout and dtype."""

from __future__ import annotations

import asyncio

from penstock.ports import Engine, Published, WeightSource
from penstock.weights.confirm import late, load_confirmed


class InProcessChannel:
    """Nothing is sent, so there is nothing to compare but the model step."""

    def __init__(self, weights: WeightSource, engine: Engine, *, timeout_s: float = 300.0) -> None:
        self._weights = weights
        self._engine = engine
        self._timeout_s = timeout_s

    async def publish(self, model_step: int) -> Published:
        """Returns when the engine serves `model_step`. Raises WeightSyncError when it does not within the deadline."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._timeout_s):
                await load_confirmed(self._engine, self._weights, model_step)
        except TimeoutError:
            raise late(model_step, self._timeout_s) from None
        num_bytes = sum(tensor.nbytes for _, tensor in self._weights.tensors())
        return Published(model_step=model_step, num_bytes=num_bytes, seconds=loop.time() - started)

    async def close(self) -> None:
        pass
