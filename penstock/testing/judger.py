"""ScriptedJudger: scores, delays and faults from a script, deterministic from its seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec

from penstock.ports import Judger
from penstock.rollout import RolloutState, Unjudged, Verdict
from penstock.testing.script import Distribution, constant, uniform


class JudgerScript(msgspec.Struct, frozen=True, kw_only=True):
    score: Distribution = uniform(0, 1)
    latency_s: Distribution = constant(0.0)
    unjudged: float = 0.0
    """Share of calls without a verdict. The shares exclude each other."""
    not_finite: float = 0.0
    raises: float = 0.0
    hangs: float = 0.0
    relative: bool = False
    """Judges whole groups."""


class ScriptedJudger(Judger):
    def __init__(self, script: JudgerScript | None = None, *, seed: int = 0) -> None:
        self.script = script or JudgerScript()
        self.relative = self.script.relative
        self.judged: Counter[str] = Counter()
        """Calls by rollout id."""
        self._seed = seed

    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        self.judged[rollout.rollout_id] += 1
        rng = random.Random(f"{self._seed}/{rollout.rollout_id}/{self.judged[rollout.rollout_id]}")
        latency_s = self.script.latency_s(rng)
        if latency_s > 0:
            await asyncio.sleep(latency_s)
        at = rng.random()
        if (at := at - self.script.hangs) < 0:
            await asyncio.get_running_loop().create_future()
        if (at := at - self.script.raises) < 0:
            raise RuntimeError("the scripted judger raised")
        if (at := at - self.script.not_finite) < 0:
            return Verdict(float("nan"))
        if at < self.script.unjudged:
            return Unjudged("the scripted judger abstained")
        return Verdict(self.script.score(rng))
