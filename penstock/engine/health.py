"""The engines of a fleet with what they must have: their lifecycle's effects are carried out here.

`lifecycle.py` decides; `Fleet` tells it what happened and when, takes work away from a fenced engine, wakes the
supervisor that brings it back, rings the alarm, and tells the observer. Nothing here waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

import msgspec

from penstock import events
from penstock.engine.config import RolloutControllerConfig
from penstock.engine.lifecycle import (
    IN_SERVICE,
    Alarm,
    Effect,
    EngineState,
    Fence,
    GiveUp,
    Lifecycle,
    Limits,
    Look,
    Recover,
    Tell,
)
from penstock.errors import EngineUnavailable, InfrastructureFailure
from penstock.events import Observer
from penstock.ports import Engine, EngineStats, KeptWeights, OnPause, WeightSource
from penstock.rollout import FailureReason

DEAD = frozenset({FailureReason.ENGINE_DIED, FailureReason.ENGINE_CLOSED})
"""Reasons of failures after which nothing more can come from an engine; they need no series."""


class RequestClock:
    """How long one engine may still take for one request.

    It runs while somebody waits for the engine, and stands still while the request is frozen: who reads a stream slowly
    does not use up the engine's time.
    """

    def __init__(self, on_pause: OnPause, timeout_s: float) -> None:
        self.on_pause = on_pause
        self._timeout_s = timeout_s
        self._left: float | None = None
        """Seconds, at the beginning of a wait; None while it stands still."""
        self._scope: asyncio.Timeout | None = None

    async def __aenter__(self) -> None:
        """Raises TimeoutError at the end of the block when the time is up. Entered once for every wait."""
        self._scope = asyncio.timeout(self._left)
        await self._scope.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        scope, self._scope = self._scope, None
        assert scope is not None
        if (ends := scope.when()) is not None:
            self._left = max(0.0, ends - asyncio.get_running_loop().time())
        await scope.__aexit__(*error)  # type: ignore[arg-type]

    def start(self) -> None:
        self._set(self._timeout_s)

    def stop(self) -> None:
        self._set(None)

    def ring(self) -> None:
        self._set(0.0)

    def _set(self, left: float | None) -> None:
        self._left = left
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(None if left is None else asyncio.get_running_loop().time() + left)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet must serve and how, when a controller takes it over."""

    model_step: int = 0
    """The published one."""
    kept: KeptWeights | None = None
    """Those weights, when they can be read again."""
    paused: bool = False
    asleep: bool = False


class Member:
    """One engine of the fleet, and what runs there."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self.clocks: dict[RequestClock, None] = {}
        """Of the requests that it was given, in that order: what ends them all ends them in the same order always."""
        self.emptied = asyncio.Event()
        """Set when it has given back the last of them, and cleared by whoever waits for that."""
        self.attention = asyncio.Event()
        """Set when its supervisor should look at it now."""
        self.recovery: Recover | None = None
        """What its supervisor is to do first."""
        self.stats = EngineStats()
        self.tokens_seen = 0
        """At its last health check."""
        self.tokens_before = 0
        """Made by processes of this engine that are gone, as far as they were seen."""
        self.busy_before = 0.0
        """The same."""
        self.seen: tuple[float, float, int] | None = None
        """When it was told how it does, with its busy seconds and tokens then."""

    def forget_process(self) -> None:
        """Its process is replaced: the counts go on."""
        self.tokens_before += self.stats.generated_tokens
        self.busy_before += self.stats.busy_seconds
        self.stats = EngineStats()
        self.tokens_seen = 0
        self.seen = None


class Fleet:
    """All engines with the weights and the mode they must have."""

    def __init__(
        self, engines: Mapping[str, Engine], config: RolloutControllerConfig, standing: Standing, observer: Observer
    ) -> None:
        self.members = [Member(name, engine) for name, engine in engines.items()]
        self.config = config
        limits = Limits(
            failures_to_fence=config.failures_to_fence,
            start_timeout_s=config.start_timeout_s,
            unavailable_timeout_s=config.unavailable_timeout_s,
            recovery_retry_s=config.recovery_retry_s,
        )
        self.life = Lifecycle(engines, limits, standing.model_step)
        self.kept = standing.kept
        """The published weights, when they can be read again; None also while the engines' own are the published."""
        self.tokens_of_left = 0
        """Made by engines that have left."""
        self.busy_of_left = 0.0
        self.sync_waits = False
        """For an engine that can take new weights, whatever it has."""
        self.load_ended = asyncio.Event()
        self.load_ended.set()
        self.paused = standing.paused
        self.asleep = standing.asleep
        self.draining = False
        """Paused for those who come, while the requests that are here finish before the engines sleep."""
        self.changed = asyncio.Event()
        """Set, and replaced, whenever something may have changed for those who wait."""
        self.on_change: Callable[[], None] = lambda: None
        self._observer = observer
        self._alarm: asyncio.TimerHandle | None = None

    # What is so.

    @property
    def published(self) -> int:
        return self.life.published

    @property
    def in_service(self) -> list[Member]:
        return [member for member in self.members if self.state(member) in IN_SERVICE]

    @property
    def obedient(self) -> list[Member]:
        """Those that are told to pause and to go on: in service, or leaving with requests still there."""
        told = IN_SERVICE | {EngineState.DRAINING}
        return [member for member in self.members if self.state(member) in told]

    @property
    def serving(self) -> list[Member]:
        """Not those that are taking new weights."""
        return [member for member in self.members if self.state(member) is EngineState.ACTIVE]

    @property
    def unavailable(self) -> EngineUnavailable | None:
        """Why nobody should wait for an engine any longer."""
        story = self.life.given_up
        return EngineUnavailable(f"no engine is active: {story}") if story is not None else None

    def state(self, member: Member) -> EngineState:
        return self.life.state(member.name)

    def describe(self) -> str:
        return "; ".join(self.life.describe(member.name) for member in self.members)

    # What happened.

    def start(self) -> None:
        self._carry_out(self.life.started(self._now()))

    def stop(self) -> None:
        self._carry_out(self.life.closed())

    def join(self, name: str, engine: Engine) -> Member:
        member = Member(name, engine)
        self.members.append(member)
        self._carry_out(self.life.joined(name))
        return member

    def drain(self, member: Member) -> None:
        self._carry_out(self.life.drains(member.name))

    def leave(self, member: Member, reason: str) -> None:
        self._carry_out(self.life.left(member.name, reason))
        member.forget_process()
        self.tokens_of_left += member.tokens_before
        self.busy_of_left += member.busy_before
        self.members.remove(member)

    def fence(self, member: Member, failure: str) -> None:
        self._carry_out(self.life.fenced(member.name, failure, self._now()))

    def request_failed(self, member: Member, failure: InfrastructureFailure) -> None:
        dead = failure.reason in DEAD
        self._carry_out(self.life.request_failed(member.name, str(failure), self._now(), dead=dead))

    def probe_answered(self, member: Member, served: int, published: int) -> None:
        self._carry_out(self.life.probe_answered(member.name, served, published, self._now()))

    def tell_load(self, member: Member, served: int) -> None:
        """What it serves, and how busy it was since the look before; at the first there is nothing to tell."""
        now, stats = self._now(), member.stats
        before, member.seen = member.seen, (now, stats.busy_seconds, stats.generated_tokens)
        if before is None or now <= before[0]:
            return
        began, busy_before, tokens_before = before
        seconds = now - began
        self._observer.notice(
            events.EngineSeen(
                engine=member.name,
                model_step=served,
                running=stats.running,
                waiting=stats.waiting,
                busy=round(min(1.0, max(0.0, (stats.busy_seconds - busy_before) / seconds)), 3),
                tokens_per_s=round(max(0, stats.generated_tokens - tokens_before) / seconds, 1),
                cache_use=round(stats.cache_use, 3),
            )
        )

    def probe_failed(self, member: Member, failure: str, *, dead: bool = False) -> None:
        self._carry_out(self.life.probe_failed(member.name, failure, self._now(), dead=dead))

    def recovering(self, member: Member, *, restarted: bool) -> None:
        self._carry_out(self.life.recovering(member.name, restarted=restarted))

    def recovered(self, member: Member, served: int) -> None:
        self._carry_out(self.life.recovered(member.name, served))

    def lacks_weights(self, member: Member, served: int) -> None:
        self._carry_out(self.life.lacks_weights(member.name, served, self._now()))

    def recovery_failed(self, member: Member, failure: str) -> None:
        self._carry_out(self.life.recovery_failed(member.name, failure, self._now()))

    def refused(self, member: Member, failure: str) -> None:
        self._carry_out(self.life.refused(member.name, failure, self._now()))

    def sync_began(self, model_step: int) -> list[Member]:
        """Those that take part."""
        names, effects = self.life.sync_began(model_step)
        self.load_ended.clear()
        self._carry_out(effects)
        return [member for member in self.members if member.name in names]

    def sync_ended(
        self, source: WeightSource, confirmed: Collection[str], failures: Mapping[str, str], kept_old: Collection[str]
    ) -> None:
        effects = self.life.sync_ended(confirmed, failures, kept_old, self._now())
        if confirmed:
            self.kept = source if isinstance(source, KeptWeights) else None
        self.load_ended.set()
        self._carry_out(effects)

    # What is to be done.

    def _carry_out(self, effects: list[Effect]) -> None:
        by_name = {member.name: member for member in self.members}
        for effect in effects:
            match effect:
                case Fence(engine=name):
                    for clock in by_name[name].clocks:
                        clock.ring()
                case Recover(engine=name):
                    by_name[name].recovery = effect
                    by_name[name].attention.set()
                case Look(engine=name):
                    by_name[name].attention.set()
                case Tell(engine=name, state=state, reason=reason):
                    self._observer.notice(events.EngineChanged(engine=name, state=state.word, reason=reason))
                case Alarm(at=at):
                    self._set_alarm(at)
                case GiveUp(reason=reason):
                    self._observer.notice(events.Alarm(text=f"no engine is active: {reason}"))
        self.changed.set()
        self.changed = asyncio.Event()
        self.on_change()

    def _set_alarm(self, at: float | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(at, self._ring) if at is not None else None

    def _ring(self) -> None:
        self._carry_out(self.life.clock(self._now()))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
