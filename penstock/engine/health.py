"""The state of each engine, and what all of them must serve.

ACTIVE --failed series, wrong weights, failed control call--> FENCED --> RECOVERING --healthy, current weights--> ACTIVE

Only an ACTIVE engine is given requests. A fenced one loses those it has: they go to another engine.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping

from penstock.engine.config import RolloutControllerConfig
from penstock.errors import EngineUnavailable
from penstock.ports import Engine, EngineStats, KeptWeights, PauseMode, WeightSource
from penstock.rollout import FailureReason

DEAD = frozenset({FailureReason.ENGINE_DIED, FailureReason.ENGINE_CLOSED})
"""Reasons of failures after which nothing more can come from an engine; they need no series."""


class EngineState(enum.StrEnum):
    ACTIVE = "active"
    FENCED = "fenced"
    RECOVERING = "recovering"


class Member:
    """One engine of the fleet. It starts as RECOVERING: it must show its health before it serves."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self.state = EngineState.RECOVERING
        self.last_failure = ""
        self.gone = False
        """It refused to start; trying again would not help."""
        self.running = 0
        self.loading = False
        self.awaits_weights = False
        """Healthy, but the published weights cannot be read again; the next sync brings it back."""
        self.doubtful = False
        """A sync failed on it: whatever model step it names, it may have other bytes."""
        self.attention = asyncio.Event()
        """Set when its supervisor should look at it now."""
        self.request_failures = 0
        self.probe_failures = 0
        self.failed_recoveries = 0
        """Since it was last active."""
        self.stats = EngineStats()
        self.tokens_seen = 0
        """At its last health check."""
        self.tokens_before = 0
        """Made by processes of this engine that are gone."""
        self.times_fenced = 0
        self._scopes: set[asyncio.Timeout] = set()

    def forget_process(self) -> None:
        """Its process is replaced: the count of tokens goes on."""
        self.tokens_before += self.stats.generated_tokens
        self.stats = EngineStats()
        self.tokens_seen = 0
        self.doubtful = False

    def enter(self, scope: asyncio.Timeout) -> None:
        self._scopes.add(scope)

    def leave(self, scope: asyncio.Timeout) -> None:
        self._scopes.discard(scope)

    def set_deadlines(self, when: float | None) -> None:
        """Of all requests that run here; None stops their clocks."""
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(when)

    def describe(self) -> str:
        return f"{self.name} is {self.state}: {self.last_failure or 'not started yet'}"


class Fleet:
    """All engines with the weights and the mode they must have. Nothing here waits."""

    def __init__(self, engines: Mapping[str, Engine], config: RolloutControllerConfig, model_step: int) -> None:
        self.members = [Member(name, engine) for name, engine in engines.items()]
        self.config = config
        self.history = [model_step]
        """Every model step that was published, in order."""
        self.kept: KeptWeights | None = None
        """The published weights, when they can be read again; None also while the engines' own are the published."""
        self.loading_step: int | None = None
        """The sync that is under way."""
        self.load_ended = asyncio.Event()
        self.load_ended.set()
        self.next_sync = asyncio.Event()
        """Set, and replaced, at the end of every sync."""
        self.pause: PauseMode | None = None
        self.asleep = False
        self.unavailable: EngineUnavailable | None = None
        """Set when no engine was active for too long, until one is."""
        self.changed = asyncio.Event()
        """Set, and replaced, whenever an engine changes its state or the fleet gives up."""
        self.on_change: Callable[[], None] = lambda: None
        self._alarm: asyncio.TimerHandle | None = None
        self._overdue = False
        """The alarm rang. An engine that is being restarted for the first time is waited for all the same."""
        self._starting = False
        """No engine was active yet, and not all have failed."""
        self._stopped = False

    @property
    def published(self) -> int:
        return self.history[-1]

    @property
    def active(self) -> list[Member]:
        return [member for member in self.members if member.state is EngineState.ACTIVE]

    @property
    def serving(self) -> list[Member]:
        """Active, and not in the middle of taking new weights."""
        return [member for member in self.active if not member.loading]

    def is_active(self, member: Member) -> bool:
        return member.state is EngineState.ACTIVE

    def start(self) -> None:
        self._set_alarm(self.config.start_timeout_s)
        self._starting = True

    def stop(self) -> None:
        self._stopped = True
        self._stop_alarm()

    def begin_sync(self, members: list[Member], model_step: int) -> None:
        self.loading_step = model_step
        self.load_ended.clear()
        for member in members:
            member.loading = True

    def end_sync(self, members: list[Member]) -> None:
        """The supervisors of those that lacked weights look at them again."""
        for member in members:
            member.loading = member.awaits_weights = False
        self.loading_step = None
        if not self.active:
            self.unavailable = None
            self._set_alarm(self.config.unavailable_timeout_s)
            self._note_no_return()
        self.load_ended.set()
        self.next_sync.set()
        self.next_sync = asyncio.Event()
        self.notify()

    def fence(self, member: Member, failure: str) -> None:
        """Take its work away; its supervisor goes on from here."""
        if member.state is not EngineState.ACTIVE:
            return
        member.state = EngineState.FENCED
        member.last_failure = failure
        member.times_fenced += 1
        member.set_deadlines(asyncio.get_running_loop().time())
        member.attention.set()
        if not self.active:
            self._set_alarm(self.config.unavailable_timeout_s)
        self.notify()

    def activate(self, member: Member) -> None:
        member.state = EngineState.ACTIVE
        member.request_failures = member.probe_failures = member.failed_recoveries = 0
        member.awaits_weights = False
        member.attention.clear()
        self.unavailable = None
        self._starting = False
        self._stop_alarm()
        self.notify()

    def stays_fenced(self, member: Member, failure: str) -> None:
        """A recovery failed; another will be tried."""
        member.state = EngineState.FENCED
        member.failed_recoveries += 1
        member.awaits_weights = False
        member.last_failure = failure
        self._note_no_return()
        self.notify()

    def lacks_weights(self, member: Member, served: int) -> None:
        """Alive, with other weights than the published, which nobody kept: the next sync brings it back."""
        member.awaits_weights = True
        member.last_failure = f"serves model step {served}, not {self.published}; only a weight sync can change that"
        self._note_no_return()
        self.notify()

    def publish(self, model_step: int, source: WeightSource) -> None:
        """At least one engine confirmed them."""
        self.history.append(model_step)
        self.kept = source if isinstance(source, KeptWeights) else None

    def retire(self, member: Member, failure: str) -> None:
        """It cannot come back."""
        member.state = EngineState.FENCED
        member.gone = True
        member.awaits_weights = False
        member.last_failure = failure
        self._note_no_return()
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
        self.on_change()

    def describe(self) -> str:
        return "; ".join(member.describe() for member in self.members)

    def _note_no_return(self) -> None:
        """Called when one does not come back, or not yet."""
        awaiting = [member for member in self.members if member.awaits_weights and self.loading_step is None]
        if all(member.gone or member in awaiting for member in self.members):
            self._give_up()  # none comes back by itself, so nobody waits any longer
        elif self._overdue:
            self._give_up_unless_one_may_come()
        elif self._starting and all(other.last_failure for other in self.members):
            self._set_alarm(self.config.unavailable_timeout_s)

    def _set_alarm(self, timeout_s: float) -> None:
        self._starting = False
        self._stop_alarm()
        if not self._stopped:
            self._alarm = asyncio.get_running_loop().call_later(timeout_s, self._give_up_unless_one_may_come)

    def _stop_alarm(self) -> None:
        self._overdue = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _give_up_unless_one_may_come(self) -> None:
        self._overdue = True
        if all(member.failed_recoveries or member.gone or member.awaits_weights for member in self.members):
            self._give_up()

    def _give_up(self) -> None:
        if self.active:
            return
        self.unavailable = EngineUnavailable(f"no engine is active: {self.describe()}")
        self.notify()
