"""The history of a run, and the one function that decides whether anything was lost, skipped or doubled.

A history is what the storage was told, event by event, and what the consumer says it got and trained. `check_history`
replays it without asking the parts that made it:

    lost       finished, and at the end neither held, trained nor discarded; or called trained, but no trainer saw it
    skipped    drawn and gone without a reason, or left out of the sequence of draws
    doubled    trained in two steps of the surviving lineage, or two groups for one draw
    stale      leased for a step beyond its task's staleness bound
    illegal    a move that the states of a group do not allow, or that starts where the group is not
    unbalanced the states as counted by the run differ from the history's
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from penstock.errors import PenstockError
from penstock.ports import FinishedTurn
from penstock.replay import Conservation, GroupState, MemoryStorage, StaleRule, Storage, Transition
from penstock.replay.lifecycle import ALLOWED
from penstock.replay.restore import Snapshot
from penstock.rollout import Group
from penstock.testing.script import Distribution

Steps = tuple[tuple[tuple[int, int], ...], ...]
"""For each rollout of a group its runs of (model step, number of tokens)."""


class Event(msgspec.Struct, frozen=True):
    """One transition, as the storage got it."""

    transition: Transition
    cursor: int | None = None
    steps: Steps | None = None
    """The versions of the group's tokens, when its content was recorded."""


class Batch(msgspec.Struct, frozen=True):
    """What the consumer got for a train step, and whether it trained it."""

    train_step: int
    group_ids: tuple[str, ...]
    trained: bool


class Restart(msgspec.Struct, frozen=True):
    """The run began again from a checkpoint: what was trained after it is no part of the surviving lineage."""

    checkpoint_step: int


class History(msgspec.Struct):
    events: list[Event] = []
    batches: list[Batch | Restart] = []

    def consumed(self, train_step: int, groups: Sequence[Group], *, trained: bool) -> None:
        """The consumer's word: it got these groups for a step and trained them, or gave them back."""
        self.batches.append(Batch(train_step, tuple(group[0].group_id for group in groups), trained))


class Findings(msgspec.Struct):
    """What is wrong with a history; every list is empty in a good one."""

    lost: list[str] = []
    skipped: list[str] = []
    doubled: list[str] = []
    stale: list[str] = []
    illegal: list[str] = []
    unbalanced: list[str] = []

    def problems(self) -> list[str]:
        return [f"{kind}: {text}" for kind, texts in msgspec.structs.asdict(self).items() for text in texts]

    def require_none(self) -> None:
        """Raises BrokenHistory with everything that was found."""
        if problems := self.problems():
            raise BrokenHistory("\n".join(problems))


class BrokenHistory(PenstockError):
    pass


def check_history(
    history: History,
    *,
    rules: Mapping[str, StaleRule] | None = None,
    held: Collection[str] | None = None,
    conservation: Mapping[str, Conservation] | None = None,
) -> Findings:
    """Replay a history. Each argument that is given adds what can be decided with it.

    `rules` per task the staleness bound; `held` the ids that the buffer or ledger holds at the end; `conservation`
    per task what the run itself counted.
    """
    findings = Findings()
    states, finished = _replay(history, rules or {}, findings)
    trained = _surviving(history, findings)
    for group_id, state in states.items():
        if state is GroupState.TRAINED:
            if history.batches and group_id not in trained:
                findings.lost.append(f"{group_id} is recorded as trained, but no consumer trained it")
        elif group_id in trained:
            findings.doubled.append(f"{group_id} was trained in step {trained[group_id]} and is {state} again")
        elif state is not GroupState.DISCARDED and held is not None and group_id not in held:
            (findings.lost if group_id in finished else findings.skipped).append(f"{group_id} was {state} and is gone")
    _compare_counts(history, states, conservation or {}, findings)
    return findings


def _replay(
    history: History, rules: Mapping[str, StaleRule], findings: Findings
) -> tuple[dict[str, GroupState], set[str]]:
    """Each group's last state, and the groups that ever finished."""
    states: dict[str, GroupState] = {}
    finished: set[str] = set()
    steps: dict[str, Steps] = {}
    cursors: Counter[str] = Counter()
    for event in history.events:
        move = event.transition
        before = states.get(move.group_id)
        if move.source is not before or move.target not in ALLOWED[before]:
            findings.illegal.append(f"{move.group_id} was {before}: {move.source} -> {move.target}")
        if event.cursor is not None:
            if event.cursor > cursors[move.task] + 1:
                findings.skipped.append(f"{move.task}: draws {cursors[move.task]} to {event.cursor - 2} have no group")
            elif event.cursor <= cursors[move.task]:
                findings.doubled.append(f"{move.group_id}: draw {event.cursor - 1} was made before")
            cursors[move.task] = max(cursors[move.task], event.cursor)
        if event.steps is not None:
            steps[move.group_id] = event.steps
        if move.target is GroupState.COMPLETED:
            finished.add(move.group_id)
        if move.target is GroupState.LEASED and move.task in rules:
            findings.stale.extend(_stale(move, steps.get(move.group_id, ()), rules[move.task]))
        states[move.group_id] = move.target
    return states, finished


def _stale(move: Transition, rollouts: Steps, rule: StaleRule) -> list[str]:
    """Own arithmetic on the recorded versions: the run's is what is under test."""
    found = []
    for index, runs in enumerate(rollouts):
        ages = [max(0, move.train_step - step - 1) for step, _ in runs]
        if rule.token_stale_threshold is not None:
            ages = [age for age in ages if age < rule.token_stale_threshold]
        if not ages or max(ages) >= rule.stale_threshold:
            found.append(
                f"{move.group_id}:{index} is leased for step {move.train_step} with tokens of {runs}; "
                f"the bound is {rule.stale_threshold}, for tokens {rule.token_stale_threshold}"
            )
    return found


def _surviving(history: History, findings: Findings) -> dict[str, int]:
    """The groups trained in the surviving lineage and their steps, by the consumer's word."""
    batches: dict[int, Batch] = {}
    for batch in history.batches:
        if isinstance(batch, Restart):
            batches = {step: kept for step, kept in batches.items() if step <= batch.checkpoint_step}
        elif batch.trained:
            if batch.train_step in batches:
                findings.doubled.append(f"train step {batch.train_step} was trained twice")
            batches[batch.train_step] = batch
    trained: dict[str, int] = {}
    for step, batch in batches.items():
        for group_id in batch.group_ids:
            if group_id in trained:
                findings.doubled.append(f"{group_id} was trained in steps {trained[group_id]} and {step}")
            trained[group_id] = step
    return trained


def _compare_counts(
    history: History, states: Mapping[str, GroupState], counted: Mapping[str, Conservation], findings: Findings
) -> None:
    tasks = {event.transition.group_id: event.transition.task for event in history.events}
    for task, conservation in counted.items():
        mine = Counter(state for group_id, state in states.items() if tasks[group_id] == task)
        theirs = {state: n for state, n in conservation.states.items() if n}
        if dict(mine) != theirs or conservation.drawn != sum(mine.values()):
            findings.unbalanced.append(f"{task}: the history ends with {dict(mine)}, the run counts {theirs}")


class RecordingStorage:
    """Writes the history of a run while another storage keeps it."""

    def __init__(
        self, inner: Storage | None = None, *, history: History | None = None,
        flush_s: Distribution | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        """`flush_s`: how long durability takes; None leaves that to the inner storage alone."""
        self.history = history if history is not None else History()
        self._inner = inner or MemoryStorage()
        self._flush_s = flush_s
        self._random = random.Random(f"flush {seed}")

    def record(self, transition: Transition, group: Group | None = None, cursor: int | None = None) -> None:
        steps = tuple(rollout.steps for rollout in group) if group is not None else None
        self.history.events.append(Event(transition, cursor, steps))
        self._inner.record(transition, group, cursor)

    def record_turn(self, sequence: int, turn: FinishedTurn) -> None:
        self._inner.record_turn(sequence, turn)

    @property
    def position(self) -> int:
        return self._inner.position

    def load(self, checkpoint_step: int, position: int | None = None) -> Snapshot:
        return self._inner.load(checkpoint_step, position)

    async def prune(self, oldest_retained_checkpoint_step: int) -> None:
        await self._inner.prune(oldest_retained_checkpoint_step)

    async def flush(self) -> None:
        if self._flush_s is not None:
            await asyncio.sleep(max(0.0, self._flush_s(self._random)))
        await self._inner.flush()

    async def close(self) -> None:
        await self._inner.close()
