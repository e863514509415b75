"""What is measured beside a step: how judging goes, and how much of the time the engines had nothing to do."""

from __future__ import annotations

import asyncio

from penstock.judger import JudgerSet
from penstock.ports import Engine


class Gauges:
    """Read once per step."""

    def __init__(self, judgers: JudgerSet, engine: Engine | None) -> None:
        """`engine` is None where engines and trainer take turns: idle engines mean nothing there."""
        self._judgers = judgers
        self._engine = engine
        self._looked_at: float | None = None
        self._busy_seconds = 0.0

    async def __call__(self) -> dict[str, float]:
        judging = {f"judger/{name}": value for name, value in (await self._judgers.metrics()).items()}
        return judging if self._engine is None else judging | await self._idle_share(self._engine)

    async def _idle_share(self, engine: Engine) -> dict[str, float]:
        """Of the time since the last look; nothing at the first."""
        now, stats = asyncio.get_running_loop().time(), await engine.stats()
        seconds = now - self._looked_at if self._looked_at is not None else 0.0
        busy = stats.busy_seconds - self._busy_seconds
        self._looked_at, self._busy_seconds = now, stats.busy_seconds
        if seconds <= 0:
            return {}
        share = busy / (seconds * max(1, stats.engines))
        return {"share/engine_idle": 1.0 - min(1.0, max(0.0, share))}
