"""Weights for an engine in the trainer's own process: the engine copies them into its own layout and dtype."""

from __future__ import annotations

import asyncio

from penstock.errors import WeightSyncError
from penstock.ports import Engine, WeightSource


class InProcessChannel:
    def __init__(self, engine: Engine, *, timeout_s: float = 300.0) -> None:
        self._engine = engine
        self._timeout_s = timeout_s

    async def publish(self, source: WeightSource, model_step: int) -> None:
        """Returns when the engine serves `model_step`. Raises WeightSyncError when it does not within the deadline."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._engine.load_weights(source, model_step)
                served = await self._engine.model_step()
        except TimeoutError:
            raise WeightSyncError(f"weights {model_step}: no confirmation within {self._timeout_s:g} s") from None
        if served != model_step:
            raise WeightSyncError(f"weights {model_step}: the engine serves {served}")
