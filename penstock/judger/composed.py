"""Several judgers as one: each data source has its own, or all of them judge and a function merges their verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pydantic

from penstock.config import nearest
from penstock.errors import ConfigError
from penstock.judger.breaker import Debut
from penstock.judger.calling import Merging
from penstock.judger.config import JudgerConfig, build_part, output_of
from penstock.judger.contract import Seconds
from penstock.judger.failure import CallFailed
from penstock.judger.handler import handler_problems
from penstock.judger.native import FunctionCaller, NativeJudgerConfig, as_verdict
from penstock.judger.pool import PoolLimits
from penstock.ports import Judger, Local, Placement
from penstock.rollout import Group, RolloutState, Unjudged, Verdict

MERGE_WAIT_S = 600.0
"""Longest wait for the worker that merges, as long as a native judger's default."""


MERGE_FAILURES = 20
"""Rollouts that a merge function fails for in the same way before it is believed to be wrong."""


class ComposedJudgerConfig(JudgerConfig):
    """`branches`: one judger per data source. Or `all_of`: every judger sees every rollout, and `merge` decides.

    `merge(verdicts)` gets a dict of verdicts by name and returns a number, a dict with `score`, or a Verdict; with
    `weights` it is called as `merge(verdicts, weights)`. It is called only when all have a verdict.
    """

    branches: dict[str, JudgerConfig] = {}
    """By data source."""
    all_of: dict[str, JudgerConfig] = {}
    """By a name of your own."""
    merge: Callable[..., Any] | str | None = None
    """A function, `package.module.name`, or `file.py:name`."""
    weights: dict[str, float] = {}
    """By the names of `all_of`."""
    merge_timeout_s: Seconds = 30.0
    """Deadline of one call of `merge`."""

    @pydantic.field_validator("branches", "all_of", mode="before")
    @classmethod
    def _accept_functions(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            name: NativeJudgerConfig(reward_handler=part) if _is_function(part) else part
            for name, part in value.items()
        }

    @property
    def data_sources(self) -> frozenset[str] | None:
        if self.branches:
            return frozenset(self.branches)
        served = [part.data_sources for part in self.all_of.values()]
        limited = [sources for sources in served if sources is not None]
        return frozenset.intersection(*limited) if limited else None

    @property
    def asks_engine(self) -> bool:
        return any(part.asks_engine for part in (*self.branches.values(), *self.all_of.values()))

    def problems(self) -> Iterator[str]:
        if bool(self.branches) == bool(self.all_of):
            yield "a composed judger needs either branches (one per data source) or all_of (merged), and not both"
        for source, part in self.branches.items():
            if part.data_sources is not None and source not in part.data_sources:
                yield f"branches[{source!r}] does not serve {source!r}.{nearest(source, list(part.data_sources))}"
        if self.all_of and self.merge is None:
            yield f"all_of has the judgers {', '.join(self.all_of)} and no merge function; give `merge`"
        if self.merge is not None:
            if not self.all_of:
                yield "merge is given and all_of is empty; branches are not merged"
            merging = Merging(weighted=bool(self.weights))
            yield from handler_problems(self.merge, field="merge", calling=lambda _: merging)
        if self.weights and set(self.weights) != set(self.all_of):
            yield f"weights names {sorted(self.weights)}; it must name all_of's {sorted(self.all_of)}"

    def build(self, placement: Placement = Local()) -> Judger:  # noqa: B008 - it has no state
        found = list(self.problems())
        if found:
            raise ConfigError(found)
        if self.branches:
            return ComposedJudger({name: build_part(part, placement) for name, part in self.branches.items()})
        assert self.merge is not None
        limits = PoolLimits(num_workers=1, timeout_s=self.merge_timeout_s, output=output_of(placement))
        merge = FunctionCaller(self.merge, limits, max_concurrency=64, kind="merge")
        return MergedJudger({n: build_part(part, placement) for n, part in self.all_of.items()}, merge, self.weights)


def as_judger_config(value: Any) -> JudgerConfig | None:
    """What a task's `judger_config` means: a configuration, a function or its name, a mapping of these by data source,
    or None.

    A mapping always becomes a composed judger, also with one entry, so that its name is checked against the rows'
    `data_source`. Raises ConfigError for anything else.
    """
    if value is None or isinstance(value, JudgerConfig):
        return value
    if _is_function(value):
        return NativeJudgerConfig(reward_handler=value)
    if isinstance(value, Mapping):
        return ComposedJudgerConfig(branches=dict(value))
    raise ConfigError(
        f"judger_config is {value!r}; it must be a JudgerConfig, a function or its name, "
        "a mapping from data source to any of these, or None"
    )


def _is_function(value: Any) -> bool:
    """Or the name of one."""
    return isinstance(value, str) or (callable(value) and not isinstance(value, type | JudgerConfig))


async def _judge_all(judger: Judger, group: Group) -> list[Verdict | Unjudged]:
    if judger.relative:
        return await judger.judge_group(group)
    return list(await asyncio.gather(*(judger.judge(rollout) for rollout in group)))


class _Several(Judger):
    def __init__(self, parts: Mapping[str, Judger]) -> None:
        self.parts = dict(parts)

    async def metrics(self) -> dict[str, float]:
        told = {name: await part.metrics() for name, part in self.parts.items()}
        return {f"{name}/{key}": value for name, metrics in told.items() for key, value in metrics.items()}

    async def close(self) -> None:
        for part in self.parts.values():
            await part.close()


class ComposedJudger(_Several):
    """Routes by the rollout's data source."""

    def __init__(self, branches: Mapping[str, Judger]) -> None:
        super().__init__(branches)
        self.relative = any(branch.relative for branch in self.parts.values())

    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        branch = self.parts.get(rollout.data_source)
        return self._no_branch(rollout) if branch is None else await branch.judge(rollout)

    async def judge_group(self, group: Group) -> list[Verdict | Unjudged]:
        """The rollouts of a group share their prompt, so one branch judges them all."""
        branch = self.parts.get(group[0].data_source) if group else None
        if branch is None:
            return [self._no_branch(rollout) for rollout in group]
        return await _judge_all(branch, group)

    def _no_branch(self, rollout: RolloutState) -> Unjudged:
        source = rollout.data_source
        return Unjudged(f"no branch for data_source {source!r}.{nearest(source, list(self.parts))}")


class MergedJudger(_Several):
    """Asks every part and merges their verdicts. One part without a verdict leaves the rollout without one."""

    def __init__(self, parts: Mapping[str, Judger], merge: FunctionCaller, weights: Mapping[str, float]) -> None:
        super().__init__(parts)
        self._merge = merge
        self._debut = Debut(merge.name, MERGE_FAILURES)
        self._weights = dict(weights)
        self._calls = self._failed = 0
        self.relative = any(part.relative for part in self.parts.values())

    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        answers = await asyncio.gather(*(part.judge(rollout) for part in self.parts.values()))
        return await self._merged(dict(zip(self.parts, answers, strict=True)))

    async def judge_group(self, group: Group) -> list[Verdict | Unjudged]:
        columns = await asyncio.gather(*(_judge_all(part, group) for part in self.parts.values()))
        rows = (dict(zip(self.parts, row, strict=True)) for row in zip(*columns, strict=True))
        return list(await asyncio.gather(*(self._merged(row) for row in rows)))

    async def _merged(self, answers: Mapping[str, Verdict | Unjudged]) -> Verdict | Unjudged:
        verdicts: dict[str, Any] = {}
        for name, answer in answers.items():
            if isinstance(answer, Unjudged):
                return Unjudged(f"{name}: {answer.reason}", answer.detail)
            verdicts[name] = answer if self._merge.pool is None else msgspec.to_builtins(answer)
        self._calls += 1
        wait_until = asyncio.get_running_loop().time() + MERGE_WAIT_S
        try:
            arguments = [verdicts, self._weights] if self._weights else [verdicts]
            merged = as_verdict(await self._merge.call(arguments, wait_until))
        except CallFailed as failure:
            self._failed += 1
            self._debut.fail(failure)
            return failure.as_unjudged("merge: ")
        self._debut.succeed()
        return merged

    async def metrics(self) -> dict[str, float]:
        return {"merge/calls": self._calls, "merge/unjudged": self._failed} | await super().metrics()

    async def close(self) -> None:
        await super().close()
        await self._merge.close()
