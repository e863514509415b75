"""The ports over calls that go elsewhere: to an actor, to one of several, or from an actor back to the driver.

Whoever holds a proxy cannot tell. Each port has two halves here: the proxy, and the server that stands before the
object in the process where it lives. Members are those of the port, no others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from penstock.cluster.member import ActorGone
from penstock.cluster.wire import PackedGroup, pack_rollouts, unpack_rollouts
from penstock.events import Event
from penstock.judger.config import added_up
from penstock.ports import (
    AgentLoop,
    Completion,
    Engine,
    EngineMember,
    EngineStats,
    FinishedTurn,
    GenerateRequest,
    Judger,
    LoadedWeights,
    WeightSource,
)
from penstock.rollout import Failure, Group, RolloutState, Status, Unjudged, Verdict


class Caller(Protocol):
    """Whom a proxy asks: a `Router`, a `OneActor`, or the driver."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Raises what the object raises, as itself; ActorGone when there is nobody to ask."""
        ...

    async def control(self, method: str, *arguments: Any) -> list[Any]:
        """Of all who are there, past the calls that wait."""
        ...

    def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]: ...


class Teller(Protocol):
    def tell(self, method: str, *arguments: Any) -> None:
        """One way; returns at once."""
        ...


CLOSE_S = 10.0
"""For an object to close; what does not is ended with its actor."""


async def close(caller: Caller) -> None:
    with contextlib.suppress(TimeoutError, ActorGone):
        async with asyncio.timeout(CLOSE_S):
            await caller.control("close")


class AgentLoopProxy:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def generate_group(self, group: Group, *, enable_partial_rollout: bool) -> Group:
        try:
            packed = await self._caller.call("generate_group", PackedGroup(group), enable_partial_rollout)
        except ActorGone as gone:
            for rollout in group:
                if rollout.status is not Status.COMPLETED:
                    rollout.fail(Failure(gone.reason, str(gone), infrastructure=True))
            return group
        return unpack_rollouts(packed, group)

    async def pause(self) -> None:
        await self._caller.control("pause")

    async def stages(self) -> dict[str, str]:
        return {name: stage for stages in await self._caller.control("stages") for name, stage in stages.items()}

    async def close(self) -> None:
        await close(self._caller)


class AgentLoopServer:
    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop

    def facts(self) -> dict[str, Any]:
        return {}

    async def generate_group(self, group: Group, enable_partial_rollout: bool) -> tuple[bytes, str]:
        return pack_rollouts(await self._loop.generate_group(group, enable_partial_rollout=enable_partial_rollout))

    async def pause(self) -> None:
        await self._loop.pause()

    async def stages(self) -> dict[str, str]:
        return await self._loop.stages()

    async def close(self) -> None:
        await self._loop.close()


class JudgerProxy(Judger):
    def __init__(self, caller: Caller, *, relative: bool) -> None:
        self.relative = relative
        self._caller = caller

    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        verdict: Verdict | Unjudged
        try:
            verdict = await self._caller.call("judge", PackedGroup([rollout]))
        except ActorGone as gone:
            return Unjudged(str(gone))
        return verdict

    async def judge_group(self, group: Group) -> list[Verdict | Unjudged]:
        verdicts: list[Verdict | Unjudged]
        try:
            verdicts = await self._caller.call("judge_group", PackedGroup(group))
        except ActorGone as gone:
            return [Unjudged(str(gone)) for _ in group]
        return verdicts

    async def metrics(self) -> dict[str, float]:
        """Of all actors together."""
        return added_up(await self._caller.control("metrics"))

    async def close(self) -> None:
        await close(self._caller)


class JudgerServer:
    def __init__(self, judger: Judger) -> None:
        self._judger = judger

    def facts(self) -> dict[str, Any]:
        return {"relative": self._judger.relative}

    async def judge(self, group: Group) -> Verdict | Unjudged:
        (rollout,) = group
        return await self._judger.judge(rollout)

    async def judge_group(self, group: Group) -> list[Verdict | Unjudged]:
        return await self._judger.judge_group(group)

    async def metrics(self) -> dict[str, float]:
        return await self._judger.metrics()

    async def close(self) -> None:
        await self._judger.close()


class EngineProxy:
    """Weights that travel are those that the engine can read where they are: `StoredWeights`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def generate(self, request: GenerateRequest) -> Completion:
        completion: Completion = await self._caller.call("generate", request)
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        async with contextlib.aclosing(self._caller.stream("stream", request)) as pieces:
            async for piece in pieces:
                yield piece

    async def score(self, ids: bytes) -> bytes:
        scores: bytes = await self._caller.call("score", ids)
        return scores

    async def pause_generation(self) -> None:
        await self._caller.control("pause_generation")

    async def continue_generation(self) -> None:
        await self._caller.control("continue_generation")

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._caller.control("abort", list(request_ids))

    async def sleep(self) -> None:
        await self._caller.control("sleep")

    async def wake(self) -> None:
        await self._caller.control("wake")

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights | None:
        (loaded,) = await self._caller.control("load_weights", source, model_step)
        assert loaded is None or isinstance(loaded, LoadedWeights)
        return loaded

    async def model_step(self) -> int:
        (step,) = await self._caller.control("model_step")
        return int(step)

    async def check_health(self) -> None:
        await self._caller.control("check_health")

    async def stats(self) -> EngineStats:
        (stats,) = await self._caller.control("stats")
        assert isinstance(stats, EngineStats)
        return stats

    async def close(self) -> None:
        await close(self._caller)


class EnginesProxy(EngineProxy):
    async def members(self) -> list[EngineMember]:
        (members,) = await self._caller.control("members")
        return list(members)

    async def add_engine(self) -> str:
        (name,) = await self._caller.control("add_engine")
        return str(name)

    async def drain_engine(self, name: str) -> None:
        await self._caller.control("drain_engine", name)


class EngineServer:
    """The members of the port are all plain calls: they are the engine's own."""

    _MEMBERS = frozenset(name for name in (*vars(EngineProxy), *vars(EnginesProxy)) if not name.startswith("_"))
    _MEMBERS |= {"drop_all"}
    """Of an engine whose callers may die."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def facts(self) -> dict[str, Any]:
        return {}

    def __getattr__(self, name: str) -> Any:
        if name not in self._MEMBERS:
            raise AttributeError(f"an engine has no {name!r}")
        return getattr(self._engine, name)


class TurnLogProxy:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def append(self, turn: FinishedTurn, *, durable: bool = False) -> None:
        await self._caller.call("append", turn, durable)


class TurnLogServer:
    def __init__(self, log: Any) -> None:
        self._log = log

    async def append(self, turn: FinishedTurn, durable: bool) -> None:
        await self._log.append(turn, durable=durable)


class ObserverProxy:
    def __init__(self, caller: Teller) -> None:
        self._caller = caller

    def notice(self, event: Event) -> None:
        self._caller.tell("notice", event)


class ObserverServer:
    def __init__(self, observer: Any) -> None:
        self._observer = observer

    def notice(self, event: Event) -> None:
        self._observer.notice(event)


SERVERS: dict[str, Any] = {
    "agent_loop": AgentLoopServer,
    "judger": JudgerServer,
    "engine": EngineServer,
    "engines": EngineServer,
    "turn_log": TurnLogServer,
    "observer": ObserverServer,
}
"""By port."""
