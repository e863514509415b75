"""The states of a group and the moves between them: pure, no I/O.

            draw             finish               lease(step)           commit(step)
 (sampler) -----> RUNNING ----------> COMPLETED ---------------> LEASED -------------> TRAINED(step)
                   |  ^                |   ^                        |                       |
       interrupted |  | retry          |   +----- crash, abort -----+   restart from a checkpoint older than step
                   v  |                v                                                    |
                 ABORTED            EXPIRED -- re-roll --> RUNNING          COMPLETED <-----+
                   |                   |
     too many tries+--> MAX_TRIES      |        MAX_TRIES waits beside EXPIRED for a tail batch
                   +--> DISCARDED(reason)

Counts are kept beside the moves, so conservation is a sum of integers: every drawn group is in exactly one state.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from penstock.errors import IllegalTransition
from penstock.replay.staleness import UNMADE, ModelSteps
from penstock.rollout import Status


class GroupState(enum.StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    MAX_TRIES = "max_tries"
    LEASED = "leased"
    TRAINED = "trained"
    DISCARDED = "discarded"


WAITING = {
    Status.COMPLETED: GroupState.COMPLETED,
    Status.ABORTED: GroupState.ABORTED,
    Status.EXPIRED: GroupState.EXPIRED,
    Status.MAX_TRIES: GroupState.MAX_TRIES,
}
"""The statuses under which a group can wait, and the state that is. The only place where the two meet: a status says
how the rollouts of a group are, a state where the group is."""


class DiscardReason(enum.StrEnum):
    FAILED = "failed"
    FILTERED = "filtered"
    EXPIRED = "expired"
    UNJUDGED = "unjudged"
    RETRIES_EXHAUSTED = "retries_exhausted"
    CANCELLED = "cancelled"


_S = GroupState

ALLOWED: dict[GroupState | None, frozenset[GroupState]] = {
    None: frozenset({_S.RUNNING}),
    _S.RUNNING: frozenset({_S.COMPLETED, _S.ABORTED, _S.DISCARDED}),
    _S.COMPLETED: frozenset({_S.LEASED, _S.EXPIRED, _S.DISCARDED}),
    _S.ABORTED: frozenset({_S.RUNNING, _S.EXPIRED, _S.MAX_TRIES, _S.DISCARDED}),
    _S.EXPIRED: frozenset({_S.RUNNING, _S.DISCARDED}),
    _S.MAX_TRIES: frozenset({_S.RUNNING, _S.DISCARDED}),
    _S.LEASED: frozenset({_S.TRAINED, _S.COMPLETED}),
    _S.TRAINED: frozenset({_S.COMPLETED}),
    _S.DISCARDED: frozenset(),
}
"""From each state (None: not yet drawn), the states a group may go to."""

_DISCARDED = _S.DISCARDED


class Transition(msgspec.Struct, frozen=True, gc=False):
    """One arrow of the diagram, as it is recorded."""

    group_id: str
    task: str
    source: GroupState | None
    target: GroupState
    train_step: int = 0
    """The consumer's step when it happened; for LEASED and TRAINED the step of the batch."""
    reason: DiscardReason | None = None
    sequence: int = 0
    """The group's place in the order of all draws, from 0."""
    draw: int = 0
    """The group's place in its task's draws."""
    tokens: int = 0
    """What the group holds after this."""
    statuses: tuple[Status, ...] = ()
    """Of its rollouts, after this."""
    wasted: tuple[tuple[str, int], ...] = ()
    """Tokens the group dropped since the transition before, by reason."""
    detail: str = ""
    """For people: what the failed rollouts of a discarded group said."""
    made: ModelSteps = UNMADE
    """Which weights made its tokens, when it was last stored."""


class Conservation(msgspec.Struct, frozen=True, kw_only=True):
    """How many groups were drawn and where they are now."""

    drawn: int
    states: dict[GroupState, int]
    discarded: dict[DiscardReason, int]

    def check(self) -> None:
        """Raises IllegalTransition when a group is lost or counted twice."""
        held = sum(self.states.values())
        if self.drawn != held or sum(self.discarded.values()) != self.states.get(GroupState.DISCARDED, 0):
            raise IllegalTransition(f"conservation broken: drawn {self.drawn}, held {held}: {self}")


class Lifecycle:
    """Moves groups and counts them. Knows nothing of their content."""

    def __init__(self) -> None:
        self.drawn: Counter[str] = Counter()
        # Plain, with all states from the beginning: a counter takes several times as long to be written to.
        self._states: dict[str, dict[GroupState, int]] = {}
        self._discarded: dict[str, Counter[DiscardReason]] = {}

    def move(self, transition: Transition, story: Callable[[], str] = str) -> None:
        """Check and count one move. Raises IllegalTransition with the group's story."""
        source, target, reason, task = transition.source, transition.target, transition.reason, transition.task
        if target not in ALLOWED[source] or (target is _DISCARDED) != (reason is not None):
            raise IllegalTransition(
                f"group {transition.group_id!r} of task {task!r} cannot go from {source} to {target}"
                f"{f' ({reason})' if reason else ''} at train step {transition.train_step}."
                f" Its story: {story() or 'none yet'}"
            )
        states = self._states.get(task)
        if states is None:
            states = self._begin(task)
        if source is None:
            self.drawn[task] += 1
        else:
            states[source] -= 1
        states[target] += 1
        if reason is not None:
            self._discarded[task][reason] += 1

    def restore(
        self, states: Mapping[str, Mapping[GroupState, int]], discarded: Mapping[str, Mapping[DiscardReason, int]]
    ) -> None:
        """Begin with these counts per task, as if all their moves had been made here."""
        for task, counts in states.items():
            self._begin(task).update(counts)
            self._discarded[task].update(discarded.get(task, {}))
            self.drawn[task] = sum(counts.values())

    def count(self, task: str, state: GroupState) -> int:
        states = self._states.get(task)
        return states[state] if states is not None else 0

    def discarded(self, task: str) -> dict[DiscardReason, int]:
        return dict(self._discarded.get(task, {}))

    def conservation(self, task: str | None = None) -> Conservation:
        """Of one task, or of all."""
        tasks = list(self._states) if task is None else [task]
        states: Counter[GroupState] = Counter()
        discarded: Counter[DiscardReason] = Counter()
        for name in tasks:
            states.update(self._states.get(name, {}))
            discarded.update(self._discarded.get(name, {}))
        return Conservation(
            drawn=sum(self.drawn[name] for name in tasks),
            states={state: states[state] for state in GroupState},
            discarded=dict(discarded),
        )

    def _begin(self, task: str) -> dict[GroupState, int]:
        self._states[task] = dict.fromkeys(GroupState, 0)
        self._discarded[task] = Counter()
        return self._states[task]
