"""A Python function as the judge.

`reward_handler(response, label, extra_info)` gets the answer's text, the ground truth and the row's extra information,
and returns a number, or a dict with `score`; other numbers in the dict become the verdict's parts, `text` its text.
Of a rollout with several turns, `extra_info["turns"]` has what the model wrote and what tools said, apart.
One with verl's parameter names (`solution_str`, ...) is called by those names; `calling.py` has the other ways.
Whatever else happens is Unjudged with the reason: no score is ever made up.

A synchronous function runs in worker processes. An async one runs on the event loop, with the same deadline.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pydantic

from penstock.judger.calling import Calling, Columns, GroupOrder, InOrder, verl_calling
from penstock.judger.config import output_of
from penstock.judger.contract import Answer, Calls, ContractConfig, ContractJudger, Count, Seconds, Try
from penstock.judger.failure import CallFailed
from penstock.judger.handler import (
    Handler,
    handler_name,
    handler_problems,
    is_async,
    locate_handler,
    resolve_handler,
)
from penstock.judger.pool import PoolLimits, WorkerPool
from penstock.judger.slots import NoSlot, Slots
from penstock.judger.worker import Arguments, Kind, Reply, call_function, describe_failure, judge_value, with_hooks
from penstock.ports import Judger, Local, Placement
from penstock.rollout import Group, RolloutState, Unjudged, Verdict

logger = logging.getLogger(__name__)


class NativeJudgerConfig(ContractConfig):
    """A Python function as a judge, with its deadline, retries and worker processes."""

    reward_handler: Callable[..., Any] | str
    """A function, `package.module.name`, or `file.py:name`."""
    per_group: bool = False
    """Call it once for a whole group, as `reward_handler(responses, label, extra_info)`; it returns one score per
    answer, None for one that it does not judge."""
    num_workers: Count = 2
    """Worker processes; each runs one call of a synchronous function at a time."""
    start_timeout_s: Seconds = 60.0
    """How long a worker may take to import the function's module."""
    max_calls_per_worker: Count = 10_000
    """After so many a worker is replaced."""
    max_worker_memory: Count = 2 << 30
    """Resident bytes; a worker above it is replaced, during a call or after it."""
    environment: list[str] = []
    """Variables that a worker gets besides those that every program needs (an API key); see `penstock.environment`."""

    @property
    def actors_name(self) -> str:
        return f"judger {handler_name(self.reward_handler)}"

    def actors_environment(self) -> tuple[str, ...]:
        return tuple(self.environment)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from handler_problems(self.reward_handler, field="reward_handler", calling=self.calling)

    def calling(self, function: Callable[..., Any]) -> Calling:
        """How the function is called."""
        if self.per_group:
            return GroupOrder()
        return verl_calling(function, {}) or InOrder()

    def build(self, placement: Placement = Local()) -> Judger:  # noqa: B008 - it has no state
        """Raises ConfigError when the function cannot be used. Worker processes start with the first call."""
        output = None if self.num_ray_actors else output_of(placement)
        return self.placed(placement, NativeJudger, output=output)


class VerlRewardConfig(NativeJudgerConfig):
    """A reward function written for verl; see `verl_reward`."""

    reward_kwargs: dict[str, Any] = {}
    """Settings that the function gets by name, as in verl's `custom_reward_function.reward_kwargs`."""

    def calling(self, function: Callable[..., Any]) -> Calling:
        return verl_calling(function, self.reward_kwargs) or InOrder()


class TrlRewardConfig(NativeJudgerConfig):
    """A reward function written for TRL; see `trl_reward`."""

    conversational: bool = False
    """Whether prompts and completions are lists of messages, as TRL has them for such datasets; else they are texts."""
    label: str = pydantic.Field(default="ground_truth", min_length=1)
    """Under which name the function is given the ground truths."""

    def calling(self, function: Callable[..., Any]) -> Calling:
        return Columns(function, conversational=self.conversational, label=self.label)


def verl_reward(
    handler: Handler, *, reward_kwargs: Mapping[str, Any] | None = None, **settings: Any
) -> VerlRewardConfig:
    """A reward function written for verl, unchanged: `compute_score(data_source, solution_str, ground_truth,
    extra_info)`, a number or a dict with `score`; those of the parameters that it has are given to it by name.

    A function, `file.py:name`, `package.module.name`, or `file.py` with a `compute_score` in it. `settings` are fields
    of NativeJudgerConfig.
    """
    if isinstance(handler, str) and handler.endswith(".py"):
        handler = f"{handler}:compute_score"
    return VerlRewardConfig(reward_handler=handler, reward_kwargs=dict(reward_kwargs or {}), **settings)


def trl_reward(
    handler: Handler, *, conversational: bool = False, label: str = "ground_truth", **settings: Any
) -> TrlRewardConfig:
    """A reward function written for TRL, unchanged: `f(prompts, completions, **columns) -> list[float | None]`.

    It is called once per group. Columns are the keys of `extra_info`, `data_source`, and the ground truth under the
    name `label`. None leaves a rollout unjudged. `settings` are fields of NativeJudgerConfig.
    """
    return TrlRewardConfig(reward_handler=handler, conversational=conversational, label=label, **settings)


class FunctionCaller:
    """Runs one function where it belongs, each call with its deadline. Raises CallFailed, and nothing else."""

    def __init__(
        self,
        handler: Handler,
        limits: PoolLimits,
        max_concurrency: int,
        kind: Kind = "judge",
        hooks: tuple[str, ...] = (),
    ) -> None:
        self.name = handler_name(handler)
        self._kind: Kind = kind
        self._timeout_s = limits.timeout_s
        self._slots = Slots(max_concurrency)
        self._calls = Calls()
        function = resolve_handler(handler)
        self.pool: WorkerPool | None = None
        if not is_async(function):
            self.pool = WorkerPool(locate_handler(handler, kind=kind, hooks=hooks), limits)
        self._function = with_hooks(function, hooks)

    async def call(self, arguments: Arguments, wait_until: float) -> Reply:
        """A reply that is no refusal."""
        if self.pool is not None:
            reply = await self.pool.call(arguments, wait_until)
        else:
            try:
                async with self._slots.take(wait_until):
                    reply = await self._calls.within(self._timeout_s, self._guarded(arguments))
            except NoSlot:
                raise CallFailed("busy", f"all {self._slots.size} concurrent calls were taken") from None
        if "unjudged" in reply:
            known = {name: reply[name] for name in ("way", "detail", "plain_bug") if name in reply}
            raise CallFailed("abstention", reply["unjudged"], **known)
        return reply

    async def _guarded(self, arguments: Arguments) -> Reply:
        try:
            return judge_value(await call_function(self._function, arguments), self._kind)
        except (Exception, SystemExit) as error:
            return describe_failure(error, self._function)

    async def close(self) -> None:
        self._calls.close()
        if self.pool is not None:
            await self.pool.close()


class NativeJudger(ContractJudger):
    def __init__(self, config: NativeJudgerConfig, output: str | None = None) -> None:
        super().__init__(handler_name(config.reward_handler), config)
        limits = PoolLimits(
            num_workers=config.num_workers,
            timeout_s=config.timeout_s,
            start_timeout_s=config.start_timeout_s,
            max_calls=config.max_calls_per_worker,
            max_memory=config.max_worker_memory,
            environment=tuple(config.environment),
            output=output,
        )
        self._calling = config.calling(resolve_handler(config.reward_handler))
        self.relative = self._calling.per_group
        self._caller = FunctionCaller(
            config.reward_handler,
            limits,
            config.max_concurrency,
            "group" if self.relative else "judge",
            self._calling.hooks,
        )
        if self._calling.described and type(config) is NativeJudgerConfig:
            logger.warning("%s has %s", self.name, self._calling.described)

    @property
    def in_workers(self) -> bool:
        """Whether the function runs in worker processes; otherwise on the event loop."""
        return self._caller.pool is not None

    async def call(self, group: Group, turn: Try) -> list[Answer]:
        reply = await self._caller.call(self._calling.arguments(group), turn.wait_until)
        return as_answers(reply, len(group)) if self.relative else [as_verdict(reply)]

    async def attempt(self, rollout: RolloutState) -> None:
        """One call that counts for nothing. Raises CallFailed."""
        await self.call([rollout], self.contract.first_try())

    async def metrics(self) -> dict[str, float]:
        """Since it was built. Latency is per call and includes the wait for a worker."""
        replaced = 0 if self._caller.pool is None else self._caller.pool.replaced
        return self.contract.metrics() | {"workers_replaced": replaced}

    async def close(self) -> None:
        await self._caller.close()


def as_verdict(reply: Reply) -> Verdict:
    """Raises CallFailed for a reply that a worker's own code would not have made."""
    try:
        verdict = msgspec.convert(reply, Verdict)
    except msgspec.ValidationError as error:  # only a function that writes to the channel itself gets here
        raise CallFailed("worker_death", f"the worker answered nonsense: {error}") from None
    if not all(math.isfinite(number) for number in (verdict.score, *verdict.parts.values())):
        raise CallFailed("worker_death", "the worker answered with a number that is not finite")
    return verdict


def as_answers(reply: Reply, number: int) -> list[Answer]:
    """Of a function that judges groups. Raises CallFailed when it judged none of them, and not by its own choice."""
    replies: Sequence[Any] = reply.get("verdicts", ())
    if not isinstance(replies, list) or not all(isinstance(one, dict) for one in replies):
        raise CallFailed("worker_death", "the worker answered nonsense: no list of verdicts")
    if len(replies) != number:
        said = f"returned {len(replies)} scores for {number} answers"
        raise CallFailed("abstention", said, way=said)
    answers = [Unjudged(str(one["unjudged"])) if "unjudged" in one else as_verdict(one) for one in replies]
    wrong = [answer.reason for answer in answers if isinstance(answer, Unjudged) and answer.reason != "returned None"]
    if len(wrong) == len(answers):
        raise CallFailed("abstention", wrong[0], way=wrong[0])
    return answers
