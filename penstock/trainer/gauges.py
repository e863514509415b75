"""What is measured beside a step: how judging goes, and how much of the time the engines had nothing to do."""

from __future__ import annotations

import asyncio

from penstock.judger import JudgerSet
from penstock.ports import Engine


class Gauges:
    """Read once per step."""

    def __init__(self, judgers: JudgerSet, engine: Engine) -> None:
        self._judgers = judgers
        self._engine = engine
        self._looked_at: float | None = None
        self._busy_seconds = 0.0

    async def __call__(self) -> dict[str, float]:
        judging = {f"judger/{name}": value for name, value in (await self._judgers.metrics()).items()}
        return judging | await self._engine_idle()

    async def _engine_idle(self) -> dict[str, float]:
        """The share of the time since the last look; nothing at the first."""
        now, stats = asyncio.get_running_loop().time(), await self._engine.stats()
        seconds = now - self._looked_at if self._looked_at is not None else 0.0
        busy = stats.busy_seconds - self._busy_seconds
        self._looked_at, self._busy_seconds = now, stats.busy_seconds
        if seconds <= 0:
            return {}
        share = busy / (seconds * max(1, stats.engines))
        return {"share/engine_idle": 1.0 - min(1.0, max(0.0, share))}
