"""Weights for an engine in the trainer's own process: the engine copies them into its own layout and dtype."""

from __future__ import annotations

import asyncio

from penstock.errors import WeightSyncError
from penstock.ports import Engine, Published, WeightSource
from penstock.weights.confirm import load_confirmed


class InProcessChannel:
    def __init__(self, engine: Engine, *, timeout_s: float = 300.0) -> None:
        self._engine = engine
        self._timeout_s = timeout_s

    async def publish(self, source: WeightSource, model_step: int) -> Published:
        """Returns when the engine serves `model_step`. Raises WeightSyncError when it does not within the deadline."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._timeout_s):
                await load_confirmed(self._engine, source, model_step)
        except TimeoutError:
            raise WeightSyncError(f"weights {model_step}: no confirmation within {self._timeout_s:g} s") from None
        num_bytes = sum(tensor.nbytes for _, tensor in source.tensors())
        return Published(model_step=model_step, num_bytes=num_bytes, seconds=loop.time() - started)

    async def close(self) -> None:
        pass
