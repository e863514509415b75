"""A Python function as the judge.

`reward_handler(response, label, extra_info)` gets the answer's text, the ground truth and the row's extra information,
and returns a number, or a dict with `score`; other numbers in the dict become the verdict's parts, `text` its text.
Whatever else happens is Unjudged with the reason: no score is ever made up.

A synchronous function runs in worker processes. An async one runs on the event loop, with the same deadline.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import pydantic

from penstock.judger.breaker import Breaker
from penstock.judger.config import JudgerConfig
from penstock.judger.handler import (
    Handler,
    handler_name,
    handler_problems,
    is_async,
    locate_handler,
    resolve_handler,
)
from penstock.judger.pool import CallFailed, PoolLimits, WorkerPool
from penstock.judger.slots import NoSlot, Slots
from penstock.judger.worker import Reply, as_reply, describe_error
from penstock.ports import Description, Judger, Local, Placement, actor_problems
from penstock.rollout import RolloutState, Unjudged, Verdict

Seconds = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, pydantic.Field(ge=1)]

_OUR_OWN = ("busy", "closed")
"""Ends of a call that say nothing about the judge: not repeated, not counted by the breaker."""


class NativeJudgerConfig(JudgerConfig):
    """A Python function as a judge, with its deadline, retries and worker processes."""

    reward_handler: Callable[..., Any] | str
    """A function, `package.module.name`, or `file.py:name`."""
    timeout_s: Seconds = 30.0
    """Deadline of one call, counted from when it has a worker."""
    max_retries: Annotated[int, pydantic.Field(ge=0)] = 2
    """How often a call that gave no verdict is repeated."""
    max_wait_s: Seconds = 600.0
    """Longest wait of a rollout for a free worker or for an open circuit, over all its calls."""
    num_workers: Count = 2
    """Worker processes; each runs one call of a synchronous function at a time."""
    start_timeout_s: Seconds = 60.0
    """How long a worker may take to import the function's module."""
    max_calls_per_worker: Count = 10_000
    max_worker_memory: Count = 2 << 30
    """Resident bytes; a worker above it is replaced, during a call or after it."""
    environment: list[str] = []
    """Variables that a worker gets besides those that every program needs (an API key); see `penstock.environment`."""
    max_concurrency: Count = 64
    """Calls of an async function at a time."""
    breaker_failures: Count = 20
    """Rollouts in a row without a verdict after which the circuit opens."""
    breaker_backoff_s: Seconds = 1.0
    """Wait before the first probe of an open circuit; doubles up to a minute."""
    cache_size: Annotated[int, pydantic.Field(ge=0)] = 0
    """Verdicts remembered; 0 for none. For functions that always answer the same."""
    version: str = ""
    """Part of the cache's key: change it when the function's meaning changes."""
    num_ray_actors: Annotated[int, pydantic.Field(ge=0)] = 0
    num_cpus_per_actor: Annotated[float, pydantic.Field(gt=0)] = 1
    cpu_memory_per_actor: Count = 1 << 30

    def problems(self) -> Iterator[str]:
        yield from handler_problems(self.reward_handler, field="reward_handler")
        yield from actor_problems(self.num_ray_actors)

    def build(self, placement: Placement = Local()) -> Judger:  # noqa: B008 - it has no state
        """Raises ConfigError when the function cannot be used. Worker processes start with the first call."""
        judger: Judger = placement.place(
            Description(
                name=f"judger {handler_name(self.reward_handler)}",
                build=NativeJudger,
                arguments={"config": self},
                num_actors=self.num_ray_actors,
                num_cpus=self.num_cpus_per_actor,
                memory=self.cpu_memory_per_actor,
            ),
            {},
        )
        return judger


class FunctionCaller:
    """Runs one function where it belongs, each call with its deadline. Raises CallFailed, and nothing else."""

    def __init__(
        self, handler: Handler, limits: PoolLimits, max_concurrency: int, takes_verdicts: bool = False
    ) -> None:
        self._function = resolve_handler(handler)
        self._timeout_s = limits.timeout_s
        self._slots = Slots(max_concurrency)
        self._abandoned: set[asyncio.Task[Reply]] = set()
        self.pool: WorkerPool | None = None
        if not is_async(self._function):
            self.pool = WorkerPool(locate_handler(handler, takes_verdicts=takes_verdicts), limits)

    async def call(self, arguments: list[Any], wait_until: float) -> Verdict:
        if self.pool is not None:
            reply = await self.pool.call(arguments, wait_until)
        else:
            try:
                async with self._slots.take(wait_until):
                    reply = await self._on_the_loop(arguments)
            except NoSlot:
                raise CallFailed("busy", f"all {self._slots.size} concurrent calls were taken") from None
        if "unjudged" in reply:
            raise CallFailed("abstention", reply["unjudged"])
        try:
            verdict = msgspec.convert(reply, Verdict)
        except msgspec.ValidationError as error:  # only a function that writes to the channel itself gets here
            raise CallFailed("worker_death", f"the worker answered nonsense: {error}") from None
        if not all(math.isfinite(number) for number in (verdict.score, *verdict.parts.values())):
            raise CallFailed("worker_death", "the worker answered with a number that is not finite")
        return verdict

    async def _on_the_loop(self, arguments: list[Any]) -> Reply:
        task = asyncio.get_running_loop().create_task(self._guarded(arguments), name="judger call")
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            if not task.done():
                task.cancel()
                # Not awaited: a function that swallows its cancellation must not hold up the rollout too.
                self._abandoned.add(task)
                task.add_done_callback(self._abandoned.discard)
        if not task.done():
            raise CallFailed("timeout", f"no answer within {self._timeout_s:g} s; the call was cancelled")
        if task.cancelled():
            raise CallFailed("abstention", "raised CancelledError")
        return task.result()

    async def _guarded(self, arguments: list[Any]) -> Reply:
        try:
            return as_reply(await self._function(*arguments))
        except (Exception, SystemExit) as error:
            return {"unjudged": describe_error(error)}

    async def close(self) -> None:
        for task in self._abandoned:
            if not task.get_loop().is_closed():
                task.cancel()
        if self.pool is not None:
            await self.pool.close()


class NativeJudger(Judger):
    def __init__(self, config: NativeJudgerConfig) -> None:
        self._config = config
        limits = PoolLimits(
            num_workers=config.num_workers,
            timeout_s=config.timeout_s,
            start_timeout_s=config.start_timeout_s,
            max_calls=config.max_calls_per_worker,
            max_memory=config.max_worker_memory,
            environment=tuple(config.environment),
        )
        self._caller = FunctionCaller(config.reward_handler, limits, config.max_concurrency)
        self._breaker = Breaker(config.breaker_failures, config.breaker_backoff_s, max(60.0, config.breaker_backoff_s))
        self._cache: collections.OrderedDict[bytes, Verdict] = collections.OrderedDict()
        self._counts: collections.Counter[str] = collections.Counter()
        self._seconds = 0.0

    @property
    def worker_pids(self) -> list[int]:
        return [] if self._caller.pool is None else self._caller.pool.pids

    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        """Waits for a free worker and for an open circuit, at most `max_wait_s`, then for its calls' own deadlines."""
        key = self._cache_key(rollout)
        if key is not None and key in self._cache:
            self._cache.move_to_end(key)
            self._counts["cache_hits"] += 1
            return self._cache[key]
        answer = await self._judge(rollout)
        if isinstance(answer, Unjudged):
            self._counts["unjudged"] += 1
        elif key is not None:
            self._cache[key] = answer
            if len(self._cache) > self._config.cache_size:
                self._cache.popitem(last=False)
        return answer

    async def _judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        wait_until = asyncio.get_running_loop().time() + self._config.max_wait_s
        if not await self._breaker.admit(wait_until):
            return Unjudged(
                f"circuit open: {self._breaker.in_a_row} rollouts in a row had no verdict; "
                f"the last one: {self._breaker.last_reason}"
            )
        try:
            verdict = await self._call_repeatedly(rollout, wait_until)
        except CallFailed as failure:
            if failure.cause in _OUR_OWN:
                self._breaker.leave()
            else:
                self._breaker.fail(failure.reason)
            return Unjudged(failure.reason)
        except BaseException:
            self._breaker.leave()
            raise
        self._breaker.succeed()
        return verdict

    async def _call_repeatedly(self, rollout: RolloutState, wait_until: float) -> Verdict:
        """Raises the last call's CallFailed when none of them gave a verdict."""
        arguments = [rollout.response_text, rollout.ground_truth, dict(rollout.extra_info)]
        for calls_left in reversed(range(1 + self._config.max_retries)):
            started = asyncio.get_running_loop().time()
            try:
                return await self._caller.call(arguments, wait_until)
            except CallFailed as failure:
                self._counts[failure.cause] += 1
                if failure.cause in _OUR_OWN or not calls_left:
                    raise
            finally:
                self._counts["calls"] += 1
                self._seconds += asyncio.get_running_loop().time() - started
        raise AssertionError("unreachable: the last call returns or raises")

    def _cache_key(self, rollout: RolloutState) -> bytes | None:
        if not self._config.cache_size:
            return None
        try:
            said = msgspec.msgpack.encode((self._config.version, rollout.prompt, rollout.response_text))
        except (TypeError, ValueError, OverflowError):
            return None
        return hashlib.blake2b(said, digest_size=16).digest()

    async def metrics(self) -> dict[str, float]:
        """Since it was built. Latency is per call and includes the wait for a worker."""
        calls = self._counts["calls"]
        return {
            "calls": calls,
            "mean_latency_s": self._seconds / calls if calls else 0.0,
            "timeouts": self._counts["timeout"],
            "worker_deaths": self._counts["worker_death"] + self._counts["memory"],
            "workers_replaced": 0 if self._caller.pool is None else self._caller.pool.replaced,
            "unjudged": self._counts["unjudged"],
            "cache_hits": self._counts["cache_hits"],
            "circuit_opened": self._breaker.times_opened,
        }

    async def close(self) -> None:
        await self._caller.close()
