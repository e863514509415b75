"""The life of the engines: events in, effects out. Nothing here waits, asks an engine or reads a clock.

    RECOVERING --well, with the published weights--> ACTIVE <--sync--> LOADING
     |  |  ^  \\                                        |                  |
     |  |  |   +--other weights, which nobody kept--> AWAITING            |
     |  |  +------------------- the next sync ----------+                 |
     |  +--failed--> FENCED <--failed series, wrong weights, failed control call, no confirmation
     |                 |
     |                 +--restart--> RECOVERING                 CLOSED: from anywhere
     +--refuses to start--> GONE

    joined ---> RECOVERING                                      leaves: from anywhere --> DRAINING --> LEFT

Only ACTIVE engines are given requests, and there is one way to become ACTIVE: to serve the published model step while
no sync is under way; one that joins later has no other. The last one in service does not leave. Hope is given up
exactly when no engine may come back: all are GONE, or AWAITING without a sync under way, or, once the alarm has rung,
have failed to come back since they were last active; those that leave or have left do not count.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Iterable, Mapping

import msgspec

from penstock.errors import IllegalTransition

STORY = 20
"""Moves of an engine that are remembered for its story."""


class EngineState(enum.StrEnum):
    RECOVERING = "recovering"
    AWAITING = "awaiting weights"
    ACTIVE = "active"
    LOADING = "loading"
    FENCED = "fenced"
    GONE = "gone"
    DRAINING = "draining"
    LEFT = "left"
    CLOSED = "closed"

    @property
    def word(self) -> str:
        """For people: active, fenced, recovering, draining or left."""
        return _WORDS.get(self, self.value)


_S = EngineState
_WORDS = {_S.AWAITING: "recovering", _S.LOADING: "active", _S.GONE: "fenced", _S.CLOSED: "fenced"}

ALLOWED: dict[EngineState, frozenset[EngineState]] = {
    _S.RECOVERING: frozenset({_S.ACTIVE, _S.AWAITING, _S.FENCED, _S.GONE, _S.DRAINING, _S.CLOSED}),
    _S.AWAITING: frozenset({_S.RECOVERING, _S.DRAINING, _S.CLOSED}),
    _S.ACTIVE: frozenset({_S.LOADING, _S.FENCED, _S.DRAINING, _S.CLOSED}),
    _S.LOADING: frozenset({_S.ACTIVE, _S.FENCED, _S.DRAINING, _S.CLOSED}),
    _S.FENCED: frozenset({_S.RECOVERING, _S.DRAINING, _S.CLOSED}),
    _S.GONE: frozenset({_S.DRAINING, _S.CLOSED}),
    _S.DRAINING: frozenset({_S.LEFT, _S.CLOSED}),
    _S.LEFT: frozenset(),
    _S.CLOSED: frozenset(),
}
"""From each state, the states an engine may go to."""

IN_SERVICE = frozenset({_S.ACTIVE, _S.LOADING})
LEAVING = frozenset({_S.DRAINING, _S.LEFT})


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    failures_to_fence: int = 3
    start_timeout_s: float = 300.0
    unavailable_timeout_s: float = 45.0
    recovery_retry_s: float = 2.0


class Fence(msgspec.Struct, frozen=True):
    """Take the engine's work away."""

    engine: str


class Recover(msgspec.Struct, frozen=True):
    """Bring the engine back: restart it if asked, health check, published weights; then say how that ended."""

    engine: str
    restart: bool
    after_s: float = 0.0


class Look(msgspec.Struct, frozen=True):
    """Make a health check now."""

    engine: str


class Tell(msgspec.Struct, frozen=True):
    """The engine is in another state, for this reason."""

    engine: str
    state: EngineState
    reason: str


class Alarm(msgspec.Struct, frozen=True):
    """Call `clock` at this time; the only alarm there is. None: at no time."""

    at: float | None


class GiveUp(msgspec.Struct, frozen=True):
    """Nobody waits for an engine any longer."""

    reason: str


Effect = Fence | Recover | Look | Tell | Alarm | GiveUp


class _Engine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.state = EngineState.RECOVERING
        self.failure = ""
        """What went wrong last."""
        self.request_failures = 0
        self.probe_failures = 0
        """Each is a series of its own: answered requests do not excuse failed health checks, nor the reverse."""
        self.failed_recoveries = 0
        """Since it was last active."""
        self.doubtful = False
        """A sync failed on it: whatever model step it names, it may have other bytes."""
        self.times_fenced = 0
        self.story: deque[str] = deque(maxlen=STORY)


class Lifecycle:
    """All engines of a fleet. Every event returns what is to be done, in order."""

    def __init__(self, names: Iterable[str], limits: Limits, model_step: int) -> None:
        self._engines = {name: _Engine(name) for name in names}
        self._limits = limits
        self.history = [model_step]
        """Every model step that was published, in order."""
        self.loading_step: int | None = None
        """The sync that is under way."""
        self._effects: list[Effect] = []
        self._starting = False
        """No engine was active yet, and not all have failed."""
        self._overdue = False
        """The alarm rang, and no engine was in service since."""
        self._given_up = False

    # What is so.

    @property
    def published(self) -> int:
        return self.history[-1]

    def knows(self, name: str) -> bool:
        """Also one that has left."""
        return name in self._engines

    def state(self, name: str) -> EngineState:
        return self._engines[name].state

    def failure(self, name: str) -> str:
        return self._engines[name].failure

    def times_fenced(self, name: str) -> int:
        return self._engines[name].times_fenced

    def is_doubtful(self, name: str) -> bool:
        return self._engines[name].doubtful

    def is_suspect(self, name: str) -> bool:
        """Its last health check failed."""
        return self._engines[name].probe_failures > 0

    def describe(self, name: str) -> str:
        engine = self._engines[name]
        return f"{name} is {engine.state.word}: {engine.failure or 'not started yet'}"

    @property
    def given_up(self) -> str | None:
        """The story of every engine, when none may come back."""
        return self._story() if self._given_up else None

    def may_leave(self, name: str) -> bool:
        """Whether another one is in service."""
        return any(engine.state in IN_SERVICE for engine in self._engines.values() if engine.name != name)

    def _may_come_back(self, engine: _Engine) -> bool:
        if engine.state in IN_SERVICE:
            return True
        if engine.state is EngineState.AWAITING:
            return self.loading_step is not None
        if engine.state in (EngineState.RECOVERING, EngineState.FENCED):
            return not (self._overdue and engine.failed_recoveries)
        return False

    # Events.

    def started(self, now: float) -> list[Effect]:
        self._starting = True
        self._effects += [Recover(name, restart=False) for name in self._engines]
        self._effects.append(Alarm(now + self._limits.start_timeout_s))
        return self._done()

    def joined(self, name: str) -> list[Effect]:
        """One more. It begins like one that was restarted."""
        assert name not in self._engines
        self._engines[name] = _Engine(name)
        self._effects += [Tell(name, EngineState.RECOVERING, "joins"), Recover(name, restart=False)]
        return self._done()

    def drains(self, name: str) -> list[Effect]:
        """It is to leave, and is given nothing more. The last one in service may not: see `may_leave`."""
        engine = self._engines[name]
        if engine.state not in (*LEAVING, EngineState.CLOSED):
            if engine.state in IN_SERVICE and not self.may_leave(name):
                raise IllegalTransition(f"engine {name} cannot leave, no other is in service: {self._story()}")
            self._move(engine, EngineState.DRAINING, "it is to leave")
        return self._done()

    def left(self, name: str, reason: str) -> list[Effect]:
        """It has drained; what it still has is taken away from it."""
        engine = self._engines[name]
        if engine.state is EngineState.DRAINING:
            engine.failure = reason
            engine.times_fenced += 1
            self._move(engine, EngineState.LEFT, reason)
            self._effects.append(Fence(name))
        return self._done()

    def request_answered(self, name: str) -> None:
        self._engines[name].request_failures = 0

    def request_failed(self, name: str, failure: str, now: float, *, dead: bool = False) -> list[Effect]:
        """`dead`: nothing more can come from it, so it needs no series."""
        engine = self._engines[name]
        if engine.state in IN_SERVICE:
            engine.request_failures += 1
            engine.failure = failure
            if dead or engine.request_failures >= self._limits.failures_to_fence:
                self._fence(engine, failure, now)
            else:
                self._effects.append(Look(name))
        return self._done()

    def probe_answered(self, name: str, served: int, published: int, now: float) -> list[Effect]:
        """`published` is what was published when the engine was asked what it serves."""
        engine = self._engines[name]
        engine.probe_failures = 0
        if engine.state is EngineState.ACTIVE and published == self.published and served != published:
            self._fence(engine, f"serves model step {served}; published is {published}", now)
        return self._done()

    def probe_failed(self, name: str, failure: str, now: float, *, dead: bool = False) -> list[Effect]:
        """One that loads weights answers when it has them; that has a deadline of its own."""
        engine = self._engines[name]
        if engine.state is EngineState.ACTIVE:
            engine.probe_failures += 1
            engine.failure = failure
            if dead or engine.probe_failures >= self._limits.failures_to_fence:
                self._fence(engine, failure, now)
        return self._done()

    def fenced(self, name: str, failure: str, now: float) -> list[Effect]:
        """One failure is enough: a control call, an answer by weights that were never published, a wish to restart."""
        engine = self._engines[name]
        if engine.state in IN_SERVICE:
            self._fence(engine, failure, now)
        return self._done()

    def recovering(self, name: str, *, restarted: bool) -> list[Effect]:
        """Its recovery begins. `restarted`: with the weights of a new process."""
        engine = self._engines[name]
        if engine.state is EngineState.FENCED:
            self._move(engine, EngineState.RECOVERING, engine.failure)
        engine.doubtful = engine.doubtful and not restarted
        return self._done()

    def loaded(self, name: str) -> None:
        """Its recovery gave it the published weights, confirmed."""
        self._engines[name].doubtful = False

    def recovered(self, name: str, served: int) -> list[Effect]:
        """It is well and obeys. It serves from here on if its weights are the published ones."""
        engine = self._engines[name]
        if engine.state is not EngineState.RECOVERING:
            return self._done()
        if self.loading_step is not None or served != self.published or engine.doubtful:
            self._effects.append(Recover(name, restart=False))
            return self._done()
        self._move(engine, EngineState.ACTIVE, "well, with the published weights")
        engine.request_failures = engine.probe_failures = engine.failed_recoveries = 0
        self._starting = self._overdue = False
        self._effects.append(Alarm(None))
        return self._done()

    def lacks_weights(self, name: str, served: int, now: float) -> list[Effect]:
        """Well, with other weights than the published, which cannot be read again: the next sync brings it back."""
        engine = self._engines[name]
        if engine.state is EngineState.RECOVERING:
            known = f"not {self.published}" if served != self.published else "and may have other bytes"
            engine.failure = f"serves model step {served}, {known}; only a weight sync can change that"
            self._move(engine, EngineState.AWAITING, engine.failure)
            self._note_failure(now)
        return self._done()

    def recovery_failed(self, name: str, failure: str, now: float) -> list[Effect]:
        engine = self._engines[name]
        if engine.state is EngineState.RECOVERING:
            engine.failure = failure
            engine.failed_recoveries += 1
            self._move(engine, EngineState.FENCED, failure)
            self._effects.append(Recover(name, restart=True, after_s=self._limits.recovery_retry_s))
            self._note_failure(now)
        return self._done()

    def refused(self, name: str, failure: str, now: float) -> list[Effect]:
        """It cannot start; trying again would not help."""
        engine = self._engines[name]
        if engine.state is EngineState.RECOVERING:
            engine.failure = failure
            self._move(engine, EngineState.GONE, failure)
            self._note_failure(now)
        return self._done()

    def sync_began(self, model_step: int) -> tuple[list[str], list[Effect]]:
        """Those that take part: the active ones and those that wait for weights."""
        taking_part = [
            engine for engine in self._engines.values() if engine.state in (EngineState.ACTIVE, EngineState.AWAITING)
        ]
        self.loading_step = model_step
        for engine in taking_part:
            if engine.state is EngineState.ACTIVE:
                self._move(engine, EngineState.LOADING, f"weights {model_step}")
        return [engine.name for engine in taking_part], self._done()

    def sync_ended(
        self, confirmed: Collection[str], failures: Mapping[str, str], kept_old: Collection[str], now: float
    ) -> list[Effect]:
        """Published if one confirmed. If none did, those that still serve what was published before go on."""
        assert self.loading_step is not None
        published = bool(confirmed)
        if published:
            self.history.append(self.loading_step)
        self.loading_step = None
        for name in (*confirmed, *failures):
            engine = self._engines[name]
            serves = name in confirmed or (not published and name in kept_old)
            engine.doubtful = not serves
            if engine.state is EngineState.LOADING:
                if serves:
                    self._move(engine, EngineState.ACTIVE, "loaded")
                else:
                    self._fence(engine, failures[name], now)
            elif engine.state is EngineState.AWAITING:
                engine.failure = failures.get(name, engine.failure)
                self._move(engine, EngineState.RECOVERING, "a sync brought weights")
                self._effects.append(Recover(name, restart=False))
        if not self._in_service():
            self._overdue = False
            self._effects.append(Alarm(now + self._limits.unavailable_timeout_s))
        return self._done()

    def clock(self, now: float) -> list[Effect]:
        """The alarm rings. An engine whose first restart is still under way is waited for all the same."""
        self._overdue = not self._in_service()
        return self._done()

    def closed(self) -> list[Effect]:
        for engine in self._engines.values():
            if engine.state not in (EngineState.CLOSED, EngineState.LEFT):
                engine.failure = "closed"
                self._move(engine, EngineState.CLOSED, "closed")
                self._effects.append(Fence(engine.name))
        self._effects.append(Alarm(None))
        self._given_up = True
        return self._done()

    # Inside.

    def _present(self) -> list[_Engine]:
        return [engine for engine in self._engines.values() if engine.state not in LEAVING]

    def _story(self) -> str:
        return "; ".join(self.describe(engine.name) for engine in self._present())

    def _in_service(self) -> bool:
        return any(engine.state in IN_SERVICE for engine in self._engines.values())

    def _fence(self, engine: _Engine, failure: str, now: float) -> None:
        engine.failure = failure
        engine.times_fenced += 1
        self._move(engine, EngineState.FENCED, failure)
        self._effects += [Fence(engine.name), Recover(engine.name, restart=True)]
        if not self._in_service():
            self._effects.append(Alarm(now + self._limits.unavailable_timeout_s))

    def _note_failure(self, now: float) -> None:
        """While the engines start for the first time, all get their time; when all have failed, less."""
        if self._starting and all(engine.failure for engine in self._present()):
            self._starting = False
            self._effects.append(Alarm(now + self._limits.unavailable_timeout_s))

    def _move(self, engine: _Engine, target: EngineState, reason: str) -> None:
        source = engine.state
        if target not in ALLOWED[source]:
            raise IllegalTransition(
                f"engine {engine.name} cannot go from {source} to {target} ({reason})."
                f" Its story: {'; '.join(engine.story) or 'none yet'}"
            )
        engine.state = target
        engine.story.append(f"{source} -> {target}: {reason}")
        if {source, target} != IN_SERVICE:
            self._effects.append(Tell(engine.name, target, reason))

    def _done(self) -> list[Effect]:
        given_up = not any(map(self._may_come_back, self._engines.values()))
        effects, self._effects = self._effects, []
        was, self._given_up = self._given_up, given_up
        if given_up and not was:
            effects.append(GiveUp(self._story()))
        return effects
