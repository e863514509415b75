"""What holds for the calls of every judge, whatever it is: cache, breaker, deadline, retries, metrics.

    judged ---> cache ---> breaker ---> call, with its deadline ---> verdicts
                              ^            |
                              |            +-- failed --> a moment later once more, at most `max_retries` times
                              +-- what is down is given a rest; a judge that never worked and always fails in the
                                  same way stops the run

A judge is a `call` that returns one answer per rollout or raises `CallFailed`. No score is ever made up: what fails
for good is Unjudged, with the reason.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import pydantic

from penstock.judger.breaker import Breaker, Debut
from penstock.judger.config import JudgerConfig
from penstock.judger.failure import CallFailed
from penstock.ports import Description, Judger, Placement
from penstock.resources import ActorsConfig
from penstock.rollout import Group, RolloutState, Unjudged, Verdict

Seconds = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, pydantic.Field(ge=1)]
Answer = Verdict | Unjudged


class Try(NamedTuple):
    """One of the calls that a rollout's verdict may take."""

    number: int
    """From 0."""
    wait_until: float
    """The loop's time until which it may wait for its turn."""


Call = Callable[[Try], Awaitable[Sequence[Answer]]]
"""Asks the judge once. Raises CallFailed."""
ResultT = TypeVar("ResultT")

LONGEST_BREAKER_BACKOFF_S = 60.0
LONGEST_RETRY_BACKOFF_S = 30.0

_OUR_OWN = ("busy", "closed")
"""Ends of a call that say nothing about the judge: not repeated, not counted by the breaker."""


class ContractConfig(JudgerConfig, ActorsConfig):
    """What every judge that is called has: a deadline, retries, a breaker, a cache."""

    timeout_s: Seconds = 30.0
    """Deadline of one call, counted from when it is its turn."""
    max_retries: Annotated[int, pydantic.Field(ge=0)] = 2
    """How often a call that gave no verdict is repeated."""
    retry_backoff_s: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.0
    """Wait before the first repetition; doubles."""
    max_wait_s: Seconds = 600.0
    """Longest wait of a rollout for its turn, for an open circuit and between repetitions, over all its calls."""
    max_concurrency: Count = 64
    """Calls at a time; of a reward function, only where it is async."""
    breaker_failures: Count = 20
    """Rollouts in a row without a verdict after which the circuit opens."""
    breaker_backoff_s: Seconds = 1.0
    """Wait before the first probe of an open circuit; doubles up to a minute."""
    cache_size: Annotated[int, pydantic.Field(ge=0)] = 0
    """Verdicts remembered; 0 for none. For judges that always answer the same."""
    version: str = ""
    """Part of the cache's key: change it when the judge's meaning changes."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.max_retries and self.retry_backoff_s >= self.max_wait_s:
            yield (
                f"retry_backoff_s is {self.retry_backoff_s:g} and max_wait_s {self.max_wait_s:g}; no call would ever "
                "be repeated: raise max_wait_s, or set max_retries to 0"
            )

    def placed(
        self, placement: Placement, build: Callable[..., Judger], *, ports: tuple[str, ...] = (), **arguments: Any
    ) -> Judger:
        """The judger that `build` makes of this configuration, here or in actors."""
        judger: Judger = placement.place(
            Description(
                name=self.actors_name,
                port="judger",
                build=build,
                arguments={"config": self, **arguments},
                ports=ports,
                num_actors=self.num_ray_actors,
                num_cpus=self.num_cpus_per_actor,
                memory=self.cpu_memory_per_actor,
                home=self.actors_home(),
                environment=self.actors_environment(),
            ),
            {},
        )
        return judger


class Contract:
    """Of one judge. Nothing here belongs to an event loop while no call runs."""

    def __init__(self, name: str, config: ContractConfig) -> None:
        self.name = name
        self._config = config
        longest = max(LONGEST_BREAKER_BACKOFF_S, config.breaker_backoff_s)
        self._breaker = Breaker(config.breaker_failures, config.breaker_backoff_s, longest)
        self._debut = Debut(name, config.breaker_failures)
        self._cache: collections.OrderedDict[bytes, Sequence[Answer]] = collections.OrderedDict()
        self._under_way: dict[bytes, asyncio.Future[None]] = {}
        """Calls whose verdicts will be in the cache."""
        self._counts: collections.Counter[str] = collections.Counter()
        self._seconds = 0.0
        self._longest_s = 0.0

    async def judged(self, rollouts: Sequence[RolloutState], call: Call) -> list[Answer]:
        """One answer per rollout, in order. Waits at most `max_wait_s`, and for its calls' own deadlines.

        Raises UserFunctionError for a judge that cannot work at all.
        """
        key = self._cache_key(rollouts)
        if key is None:
            return await self._asked(call, len(rollouts))
        if (asked := self._under_way.get(key)) is not None and asked.get_loop() is asyncio.get_running_loop():
            # Siblings often write the same. Once: a call that gave no verdict is made by each of them.
            await asyncio.wait({asked})
        if key in self._cache:
            self._cache.move_to_end(key)
            self._counts["cache_hits"] += 1
            return list(self._cache[key])
        done = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            answers = await self._asked(call, len(rollouts))
            if not any(isinstance(answer, Unjudged) for answer in answers):
                self._cache[key] = answers
                if len(self._cache) > self._config.cache_size:
                    self._cache.popitem(last=False)
            return list(answers)
        finally:
            done.set_result(None)
            if self._under_way.get(key) is done:
                del self._under_way[key]

    def first_try(self) -> Try:
        """Of a rollout that is judged now."""
        return Try(0, asyncio.get_running_loop().time() + self._config.max_wait_s)

    def metrics(self) -> dict[str, float]:
        """Since it was built. Latency is per call and includes the wait for its turn."""
        calls = self._counts["calls"]
        return {
            "calls": calls,
            "mean_latency_s": self._seconds / calls if calls else 0.0,
            "max_latency_s": self._longest_s,
            "timeouts": self._counts["timeout"],
            "abstentions": self._counts["abstention"],
            "worker_deaths": self._counts["worker_death"] + self._counts["memory"],
            "unjudged": self._counts["unjudged"],
            "cache_hits": self._counts["cache_hits"],
            "circuit_opened": self._breaker.times_opened,
        }

    # Inside.

    async def _asked(self, call: Call, number: int) -> list[Answer]:
        answers = await self._admitted(call, number)
        self._counts["unjudged"] += sum(isinstance(answer, Unjudged) for answer in answers)
        return list(answers)

    async def _admitted(self, call: Call, number: int) -> Sequence[Answer]:
        wait_until = self.first_try().wait_until
        if not await self._breaker.admit(wait_until):
            reason = (
                f"circuit open: {self._breaker.in_a_row} rollouts in a row had no verdict; "
                f"the last one: {self._breaker.last_reason}"
            )
            return [Unjudged(reason)] * number
        try:
            answers = await self._repeated(call, wait_until)
        except CallFailed as failure:
            if failure.cause in _OUR_OWN:
                self._breaker.leave()
            else:
                self._debut.fail(failure)
                self._breaker.fail(failure.reason)
            return [failure.as_unjudged()] * number
        except BaseException:
            self._breaker.leave()
            raise
        self._debut.succeed()
        self._breaker.succeed()
        self._counts["abstention"] += sum(isinstance(answer, Unjudged) for answer in answers)
        return answers

    async def _repeated(self, call: Call, wait_until: float) -> Sequence[Answer]:
        """Raises the last call's CallFailed when none of them gave a verdict."""
        loop, backoff_s = asyncio.get_running_loop(), self._config.retry_backoff_s
        for number in range(1 + self._config.max_retries):
            started = loop.time()
            try:
                return await call(Try(number, wait_until))
            except CallFailed as failure:
                self._counts[failure.cause] += 1
                last = number == self._config.max_retries or (backoff_s and loop.time() + backoff_s >= wait_until)
                if failure.cause in _OUR_OWN or not failure.may_pass or last:
                    raise
            finally:
                self._counts["calls"] += 1
                self._seconds += loop.time() - started
                self._longest_s = max(self._longest_s, loop.time() - started)
            if backoff_s:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_RETRY_BACKOFF_S)
        raise AssertionError("unreachable: the last call returns or raises")

    def _cache_key(self, rollouts: Sequence[RolloutState]) -> bytes | None:
        if not self._config.cache_size or not rollouts:
            return None
        # What tools said is part of an answer: reward functions are told it.
        answers = [(rollout.response_text, rollout.turns if len(rollout.turns) > 1 else ()) for rollout in rollouts]
        said = (self._config.version, rollouts[0].prompt, answers)
        try:
            return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=16).digest()
        except (TypeError, ValueError, OverflowError):
            return None


class ContractJudger(Judger):
    """A judge whose answers come from calls under the contract. Subclasses say how one call is made."""

    def __init__(self, name: str, config: ContractConfig) -> None:
        self.name = name
        self.contract = Contract(name, config)

    @abc.abstractmethod
    async def call(self, group: Group, turn: Try) -> Sequence[Answer]:
        """Ask once: about one rollout, or where the judge is relative about all of a group. Raises CallFailed."""

    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        """Waits for its turn and for an open circuit, at most `max_wait_s`, then for its calls' own deadlines."""
        (answer,) = await self._judged([rollout])
        return answer

    async def judge_group(self, group: Group) -> list[Verdict | Unjudged]:
        if self.relative and group:
            return await self._judged(group)
        return list(await asyncio.gather(*map(self.judge, group)))

    async def _judged(self, group: Group) -> list[Answer]:
        return await self.contract.judged(group, lambda turn: self.call(group, turn))

    async def metrics(self) -> dict[str, float]:
        return self.contract.metrics()


class Calls:
    """Calls on the event loop that end at their deadline, whether what is called agrees or not."""

    def __init__(self) -> None:
        self._abandoned: set[asyncio.Task[Any]] = set()

    async def within(self, seconds: float, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Raises CallFailed at the deadline, and what `work` raises; its own cancellation is an abstention."""
        task = asyncio.get_running_loop().create_task(work, name="judger call")
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            if not task.done():
                task.cancel()
                # Not awaited: code that swallows its cancellation must not hold up the rollout too.
                self._abandoned.add(task)
                task.add_done_callback(self._forget)
        if not task.done():
            raise CallFailed("timeout", f"no answer within {seconds:g} s; the call was cancelled")
        if task.cancelled():
            raise CallFailed("abstention", "raised CancelledError")
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio would report it as never retrieved

    def close(self) -> None:
        for task in self._abandoned:
            if not task.get_loop().is_closed():
                task.cancel()
