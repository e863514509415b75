"""A rollout in, a reward out, or the reason why there is none.

    config.py     JudgerConfig; JudgerSet, which builds each judger once for all who use it
    native.py     NativeJudger: a Python function, in worker processes when it is synchronous
    composed.py   ComposedJudger: one judger per data source, or several merged; what a task's `judger_config` may be
    rewards.py    reward functions that come with Penstock
    handler.py    where a reward function is found again in another process
    pool.py       worker processes that are killed and replaced when they hang
    worker.py     the program such a process runs
    breaker.py    what holds calls back while a judge is down, and stops a run whose judge cannot work
    trial.py      check_judgers: a few calls before a model is loaded

Names are loaded when first used: a worker process imports this package and must start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.judger.composed import ComposedJudger, ComposedJudgerConfig, as_judger_config
    from penstock.judger.config import JudgerConfig, JudgerSet
    from penstock.judger.native import NativeJudger, NativeJudgerConfig
    from penstock.judger.rewards import (
        exact_match,
        final_number,
        matching_characters,
        math_equal,
        reasoning_gym_score,
        weighted_sum,
    )
    from penstock.judger.trial import check_judgers, try_judger
    from penstock.ports import Judger

_HOMES = {
    "ComposedJudger": "penstock.judger.composed",
    "ComposedJudgerConfig": "penstock.judger.composed",
    "Judger": "penstock.ports",
    "JudgerConfig": "penstock.judger.config",
    "JudgerSet": "penstock.judger.config",
    "NativeJudger": "penstock.judger.native",
    "NativeJudgerConfig": "penstock.judger.native",
    "as_judger_config": "penstock.judger.composed",
    "check_judgers": "penstock.judger.trial",
    "exact_match": "penstock.judger.rewards",
    "final_number": "penstock.judger.rewards",
    "matching_characters": "penstock.judger.rewards",
    "math_equal": "penstock.judger.rewards",
    "reasoning_gym_score": "penstock.judger.rewards",
    "try_judger": "penstock.judger.trial",
    "weighted_sum": "penstock.judger.rewards",
}

__all__ = [
    "ComposedJudger",
    "ComposedJudgerConfig",
    "Judger",
    "JudgerConfig",
    "JudgerSet",
    "NativeJudger",
    "NativeJudgerConfig",
    "as_judger_config",
    "check_judgers",
    "exact_match",
    "final_number",
    "matching_characters",
    "math_equal",
    "reasoning_gym_score",
    "try_judger",
    "weighted_sum",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
