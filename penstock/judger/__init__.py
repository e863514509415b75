"""A rollout in, a reward out, or the reason why there is none.

    config.py     JudgerConfig; JudgerSet, which builds each judger once for all who use it
    contract.py   what holds for the calls of every judge: cache, breaker, deadline, retries, metrics
    native.py     NativeJudger: a Python function, in worker processes when it is synchronous; those of verl and TRL
    service.py    HTTPJudger: a service that is posted the rollout
    llm.py        LLMJudger, PairwiseJudger, RankingJudger: a language model, on an endpoint or on the run's engines
    code.py       CodeJudger: the answer is code, run against tests in a sandbox (`sandbox/`)
    composed.py   ComposedJudger: one judger per data source, or several merged; what a task's `judger_config` may be
    rewards.py    reward functions that come with Penstock

    calling.py    how a reward function is called
    handler.py    where a reward function is found again in another process
    pool.py       worker processes that are killed and replaced when they hang
    worker.py     the program such a process runs
    channel.py    frames between processes
    asking.py     whom a language model that judges is asked through
    pattern.py    what a regular expression finds in its answer
    code_tests.py the forms that tests have in datasets, and what is equal to what
    slots.py      a bounded number of calls at a time
    failure.py    how a call ends that gives no verdict
    breaker.py    what holds calls back while a judge is down, and stops a run whose judge cannot work
    trial.py      check_judgers: a few calls before a model is loaded

Names are loaded when first used: a worker process imports this package and must start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.judger.asking import RunEngine
    from penstock.judger.code import CodeJudger, CodeJudgerConfig
    from penstock.judger.composed import ComposedJudger, ComposedJudgerConfig, as_judger_config
    from penstock.judger.config import JudgerConfig, JudgerSet
    from penstock.judger.contract import ContractConfig, ContractJudger
    from penstock.judger.llm import (
        LLMJudger,
        LLMJudgerConfig,
        PairwiseJudger,
        PairwiseJudgerConfig,
        RankingJudger,
        RankingJudgerConfig,
    )
    from penstock.judger.native import NativeJudger, NativeJudgerConfig, trl_reward, verl_reward
    from penstock.judger.rewards import (
        dapo_math,
        exact_match,
        final_number,
        matching_characters,
        math_equal,
        reasoning_gym_score,
        weighted_sum,
    )
    from penstock.judger.sandbox.config import SandboxConfig
    from penstock.judger.service import HTTPJudger, HTTPJudgerConfig
    from penstock.judger.trial import check_judgers, try_judger
    from penstock.ports import Judger

_HOMES = {
    "CodeJudger": "penstock.judger.code",
    "CodeJudgerConfig": "penstock.judger.code",
    "ComposedJudger": "penstock.judger.composed",
    "ComposedJudgerConfig": "penstock.judger.composed",
    "ContractConfig": "penstock.judger.contract",
    "ContractJudger": "penstock.judger.contract",
    "HTTPJudger": "penstock.judger.service",
    "HTTPJudgerConfig": "penstock.judger.service",
    "Judger": "penstock.ports",
    "JudgerConfig": "penstock.judger.config",
    "JudgerSet": "penstock.judger.config",
    "LLMJudger": "penstock.judger.llm",
    "LLMJudgerConfig": "penstock.judger.llm",
    "NativeJudger": "penstock.judger.native",
    "NativeJudgerConfig": "penstock.judger.native",
    "PairwiseJudger": "penstock.judger.llm",
    "PairwiseJudgerConfig": "penstock.judger.llm",
    "RankingJudger": "penstock.judger.llm",
    "RankingJudgerConfig": "penstock.judger.llm",
    "RunEngine": "penstock.judger.asking",
    "SandboxConfig": "penstock.judger.sandbox.config",
    "as_judger_config": "penstock.judger.composed",
    "check_judgers": "penstock.judger.trial",
    "dapo_math": "penstock.judger.rewards",
    "exact_match": "penstock.judger.rewards",
    "final_number": "penstock.judger.rewards",
    "matching_characters": "penstock.judger.rewards",
    "math_equal": "penstock.judger.rewards",
    "reasoning_gym_score": "penstock.judger.rewards",
    "trl_reward": "penstock.judger.native",
    "try_judger": "penstock.judger.trial",
    "verl_reward": "penstock.judger.native",
    "weighted_sum": "penstock.judger.rewards",
}

__all__ = [
    "CodeJudger",
    "CodeJudgerConfig",
    "ComposedJudger",
    "ComposedJudgerConfig",
    "ContractConfig",
    "ContractJudger",
    "HTTPJudger",
    "HTTPJudgerConfig",
    "Judger",
    "JudgerConfig",
    "JudgerSet",
    "LLMJudger",
    "LLMJudgerConfig",
    "NativeJudger",
    "NativeJudgerConfig",
    "PairwiseJudger",
    "PairwiseJudgerConfig",
    "RankingJudger",
    "RankingJudgerConfig",
    "RunEngine",
    "SandboxConfig",
    "as_judger_config",
    "check_judgers",
    "dapo_math",
    "exact_match",
    "final_number",
    "matching_characters",
    "math_equal",
    "reasoning_gym_score",
    "trl_reward",
    "try_judger",
    "verl_reward",
    "weighted_sum",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
