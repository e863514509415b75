"""ReplayBuffer: what was drawn and is not yet trained, and where each group stands.

Every change is one move of `lifecycle`, applied here at once and recorded in order by the storage. Reading and moving
never wait; only `flush` does, for durability, and `wait_ready`, for groups to finish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from penstock.errors import IllegalTransition, LedgerError, NotReady
from penstock.ports import FinishedTurn
from penstock.replay.accounting import TokenAccount
from penstock.replay.give_back import give_back
from penstock.replay.lifecycle import WAITING, Conservation, DiscardReason, GroupState, Lifecycle, Transition
from penstock.replay.restore import Restored
from penstock.replay.shelf import Entry, Order, Shelves
from penstock.replay.signal import Signal
from penstock.replay.staleness import ModelSteps, StaleRule
from penstock.replay.storage import MemoryStorage, Storage
from penstock.rollout import (
    UNKNOWN_STEP,
    Group,
    RolloutState,
    Status,
    fill_model_steps,
    reset_rollout_response,
)

MAX_DETAIL = 500
"""Characters of the failures that are kept with a discarded group."""


class ReplayBuffer:
    """Holds groups by task and status. One event loop, one writer."""

    def __init__(self, *, order: Order = "fifo", storage: Storage | None = None) -> None:
        self._storage: Storage = storage or MemoryStorage()
        self._lifecycle = Lifecycle()
        self._entries: dict[str, Entry] = {}
        self._shelves = Shelves(order)
        self._leases: dict[int, list[Entry]] = {}
        self._next_sequence = 0
        self._train_step = 0
        """The latest consumer's step that staleness was looked at for."""
        self.changed = Signal()
        """Notified whenever a group arrives at or leaves a waiting state, or ends, and by nobody else."""
        self.tokens = TokenAccount()

    # Drawing and retrying: into RUNNING.

    def draw(self, group: Group, cursor: int) -> None:
        """A new group begins. Its drawing and the sampler's cursor are one transition."""
        entry = Entry.drawn(group, self._next_sequence)
        if entry.group_id in self._entries:
            raise IllegalTransition(f"group {entry.group_id!r} is drawn twice: {self._entries[entry.group_id].story}")
        self._next_sequence += 1
        self._entries[entry.group_id] = entry
        self._move(entry, GroupState.RUNNING, train_step=self._train_step, group=group, cursor=cursor)

    def get(self, n: int, task: str, status: Status) -> list[Group]:
        """Up to n groups of this status, in replay order, to be played again: they are RUNNING now.

        Only for statuses that are retried; completed groups leave through `take_batch`.
        """
        if status is Status.COMPLETED:
            raise ValueError("completed groups are taken with take_batch, not played again")
        shelf = self._shelves.of(task, WAITING[status])
        if not len(shelf):  # asked for every group that is drawn
            return []
        groups = []
        for _ in range(min(n, len(shelf))):
            entry = shelf.pop_first()
            if entry.rule is not None:
                # Siblings may have expired since the group was shelved; they are made again with the rest.
                entry.rule.mark_expired(entry.group, self._train_step)
                entry.look()
            self._move(entry, GroupState.RUNNING, train_step=self._train_step)
            groups.append(entry.group)
        self.changed.notify()
        return groups

    async def append(self, turn: FinishedTurn, *, durable: bool = False) -> None:
        """Keep a finished turn of a group that is being played: a `TurnLog`. Waits for the disk only if `durable`.

        A restart gives it back to its rollout, unless the group was stored or discarded since. Raises
        IllegalTransition, with the group's story, when it is not the turn of a RUNNING group.
        """
        entry = self._running(turn.group_id, turn.task_name)
        if not entry.has_rollout(turn.rollout_id):
            raise IllegalTransition(f"group {turn.group_id!r} has no rollout {turn.rollout_id!r}: {entry.story}")
        self._storage.record_turn(entry.sequence, turn)
        if durable:
            await self.flush()

    # Finishing: out of RUNNING.

    def put(
        self, group: Group, task: str, *, model_step: int, current_train_step: int, stale_threshold: StaleRule | int
    ) -> Status:
        """Store a played group under its status and return the status it has after staleness was applied.

        `model_step` is that of the attempt's start and fills missing token versions. `stale_threshold` is the task's
        whole rule, or a number where expired groups wait and no token is masked. It is durable after the next `flush`.
        """
        entry = self._running(group[0].group_id, task)
        made = ModelSteps.of(group)
        if made.oldest == UNKNOWN_STEP:
            for rollout in group:
                fill_model_steps(rollout, model_step)
            made = ModelSteps.of(group)
        entry.hold(group)
        entry.made = made
        entry.rule = StaleRule(stale_threshold) if isinstance(stale_threshold, int) else stale_threshold
        self.tokens.count(entry, group)
        status = entry.status
        if status not in WAITING:
            raise ValueError(f"group {entry.group_id!r} is {status}; such a group is discarded, not stored")
        first = GroupState.COMPLETED if status is Status.COMPLETED else GroupState.ABORTED
        self._move(entry, first, train_step=current_train_step, group=group)
        status = self._shelve(entry, current_train_step)
        self.changed.notify()
        return status

    def discard(self, group: Group, task: str, reason: DiscardReason, *, train_step: int = 0) -> None:
        """End a running group for a reason; nothing of it is held any more."""
        entry = self._running(group[0].group_id, task)
        entry.hold(group)
        self.tokens.count(entry, group)
        self._discard(entry, reason, train_step, detail=_failures(group))
        self.changed.notify()

    def discard_all(self, task: str, reason: DiscardReason) -> None:
        """End every group of a task that is played or waits; leased ones stay. What plays them may not store them."""
        for entry in [entry for entry in self._entries.values() if entry.task == task]:
            if entry.state in (GroupState.LEASED, GroupState.TRAINED):
                continue
            if entry.state is GroupState.RUNNING:
                entry.look()
                self.tokens.count(entry, entry.group)
            else:
                assert entry.state is not None
                self._shelves.of(task, entry.state).remove(entry)
            self._discard(entry, reason, self._train_step)
        self.changed.notify()

    def forget_response(self, rollout: RolloutState, why: str) -> int:
        """Drop a running rollout's answer to make it again; its tokens count as wasted. Returns how many."""
        n = rollout.num_tokens
        self.tokens.drop(self._entries[rollout.group_id], why, n)
        reset_rollout_response(rollout)
        return n

    # Consuming: COMPLETED -> LEASED -> TRAINED.

    def is_ready(self, sizes: Mapping[str, int]) -> bool:
        return all(self.count(task, Status.COMPLETED) >= n for task, n in sizes.items())

    async def wait_ready(
        self, sizes: Mapping[str, int], *, or_when: Callable[[], bool] = bool, changed: Signal | None = None
    ) -> None:
        """Until `is_ready`, or the other condition; woken by the group that makes it so. Callers bound the wait.

        `changed` is what is notified of both, when the other condition is not about the buffer.
        """
        await (changed or self.changed).wait_until(lambda: self.is_ready(sizes) or or_when())

    def take_batch(self, sizes: Mapping[str, int], *, train_step: int) -> dict[str, list[Group]]:
        """Lease the asked number of completed groups per task, in replay order; all or nothing.

        Never waits: `wait_ready` does. A leased group returns if this process dies or the step fails;
        it is gone only after `commit`. Raises NotReady with the counts per task when one has too few, and
        IllegalTransition, nothing leased, when the step has a batch already or a group is too stale for it.
        """
        if train_step in self._leases:
            raise IllegalTransition(
                f"train step {train_step} has a batch of {len(self._leases[train_step])} groups already; "
                "commit it or give it back before the next one is taken"
            )
        if not self.is_ready(sizes):
            counts = {task: f"{self.count(task, Status.COMPLETED)} of {n}" for task, n in sizes.items()}
            raise NotReady(f"train step {train_step}: completed groups per task: {counts}")
        taken = [
            entry for task, n in sizes.items() for entry in self._shelves.of(task, GroupState.COMPLETED).take_first(n)
        ]
        self._require_fresh(taken, train_step)
        batch: dict[str, list[Group]] = {task: [] for task in sizes}
        for entry in taken:
            self._move(entry, GroupState.LEASED, train_step=train_step)
            batch[entry.task].append(entry.group)
        self._leases[train_step] = taken
        self.changed.notify()
        return batch

    def commit(self, train_step: int) -> None:
        """The step is done: its leased groups are TRAINED. Raises IllegalTransition when it has no batch."""
        if train_step not in self._leases:
            raise IllegalTransition(
                f"train step {train_step} has no batch to commit: none was taken, or it was committed or given back"
            )
        for entry in self._leases.pop(train_step):
            self._move(entry, GroupState.TRAINED, train_step=train_step)
            self.tokens.train(entry)
            del self._entries[entry.group_id]

    def return_lease(self, train_step: int) -> dict[str, int]:
        """The step was refused: its groups are COMPLETED again, in their old places. Returns how many per task."""
        returned: dict[str, int] = {}
        for entry in self._leases.pop(train_step, []):
            self._move(entry, GroupState.COMPLETED, train_step=train_step)
            self._shelve(entry, train_step)
            returned[entry.task] = returned.get(entry.task, 0) + 1
        self.changed.notify()
        return returned

    def refresh_staleness(self, train_step: int, tasks: Iterable[str] | None = None) -> dict[str, int]:
        """Expire what is too stale for `train_step`; touches only those groups. Returns how many per task."""
        self._train_step = max(self._train_step, train_step)
        names = list(tasks) if tasks is not None else self._shelves.tasks()
        expired = dict.fromkeys(names, 0)
        touched = False
        for task in names:
            for state in (GroupState.COMPLETED, GroupState.ABORTED):
                for entry in self._shelves.of(task, state).pop_expired(train_step):
                    touched = True
                    if self._shelve(entry, train_step) is Status.EXPIRED:
                        expired[task] += 1
        if touched:
            self.changed.notify()
        return expired

    # Looking.

    def count(self, task: str, status: Status) -> int:
        return self._lifecycle.count(task, WAITING[status])

    def count_statuses(self, task: str) -> dict[Status, int]:
        """How many groups wait, by status."""
        return {status: self.count(task, status) for status in WAITING}

    def state_count(self, task: str, state: GroupState) -> int:
        return self._lifecycle.count(task, state)

    def discarded(self, task: str) -> dict[DiscardReason, int]:
        """How many groups were discarded since the run began, by reason."""
        return self._lifecycle.discarded(task)

    def conservation(self, task: str | None = None) -> Conservation:
        return self._lifecycle.conservation(task)

    def story(self, group_id: str) -> str:
        """What happened to a group that is still held, as `state@train step`."""
        return self._entries[group_id].story

    async def flush(self) -> None:
        """Returns when everything decided so far is durable."""
        await self._storage.flush()

    async def prune(self, oldest_retained_checkpoint_step: int) -> None:
        """Let the storage drop what no retained checkpoint can ask for again: it keeps the events."""
        await self._storage.prune(oldest_retained_checkpoint_step)

    async def close(self) -> None:
        await self._storage.close()

    # Restarting.

    @property
    def position(self) -> int:
        """How much was recorded; a checkpoint keeps it for `restore`."""
        return self._storage.position

    def restore(
        self,
        checkpoint_step: int,
        rules: Mapping[str, StaleRule],
        *,
        position: int | None = None,
        accepted: Callable[[], object] = bool,
    ) -> Restored:
        """Go on from what the storage kept, with the weights of `checkpoint_step`. Only on a buffer not yet used.

        What was running is ABORTED, what was leased or trained after the checkpoint is COMPLETED, the rest stays.
        Staleness by `rules` is applied at the next refresh. These are moves like any other, and each depends on its
        own group alone: a crash among them changes nothing. `accepted` is called before the first of them. Raises
        LedgerError, nothing changed, when the ledger cannot be used.
        """
        if self._entries or self._next_sequence:
            raise RuntimeError("a buffer is restored before anything is drawn")
        snapshot = self._storage.load(checkpoint_step, position)
        unknown = sorted({held.content.task for held in snapshot.held} - set(rules))
        if unknown:
            raise LedgerError(f"the ledger holds groups of tasks {unknown}, this run has {sorted(rules)}; add them")
        accepted()
        self._lifecycle.restore(snapshot.states, snapshot.discarded)
        self._next_sequence = snapshot.next_sequence
        self._train_step = checkpoint_step + 1
        self.tokens.restore(
            trained=snapshot.trained_tokens,
            held=sum(held.tokens for held in snapshot.held),
            wasted=snapshot.wasted,
        )
        returned: Counter[GroupState] = Counter()
        for held in snapshot.held:
            entry = Entry.restored(held)
            entry.rule = rules[entry.task]
            self._entries[entry.group_id] = entry
            if held.state in (GroupState.RUNNING, GroupState.LEASED, GroupState.TRAINED):
                returned[held.state] += 1
            target, group = give_back(entry, held, self.tokens)
            if target is not entry.state:
                self._move(entry, target, train_step=self._train_step, group=group)
            entry.expires_at = entry.first_expiry()
            self._shelves.of(entry.task, target).add(entry)
        self.changed.notify()
        return Restored(cursors=snapshot.cursors, trained=snapshot.trained, returned=dict(returned))

    # Inside.

    def _running(self, group_id: str, task: str) -> Entry:
        entry = self._entries.get(group_id)
        if entry is None or entry.state is not GroupState.RUNNING or entry.task != task:
            story = entry.story if entry is not None else "not held: never drawn, or already trained or discarded"
            raise IllegalTransition(f"group {group_id!r} of task {task!r} is not running: {story}")
        return entry

    def _require_fresh(self, taken: Iterable[Entry], train_step: int) -> None:
        """Staleness is asserted where a batch is consumed, whoever should have expired the group before."""
        stale = [entry for entry in taken if entry.expires_at <= train_step]
        if not stale:
            return
        for entry in taken:
            self._shelves.of(entry.task, GroupState.COMPLETED).add(entry)
        raise IllegalTransition(
            f"group {stale[0].group_id!r} is too stale for train step {train_step} (the last one it could serve is "
            f"{stale[0].expires_at - 1}); refresh the staleness before a batch is taken. Its story: {stale[0].story}"
        )

    def _shelve(self, entry: Entry, train_step: int) -> Status:
        """Apply staleness and put the entry where its status belongs, moving it if that differs from its state."""
        assert entry.rule is not None
        if train_step > self._train_step:
            self._train_step = train_step
        entry.expires_at = entry.first_expiry()
        if entry.expires_at <= train_step:
            entry.expires_at = entry.rule.mark_expired(entry.group, train_step)
            entry.look()
        status = entry.status
        if status is Status.EXPIRED and entry.rule.discard_expired:
            self._discard(entry, DiscardReason.EXPIRED, train_step)
            return status
        target = WAITING[status]
        if target is not entry.state:
            self._move(entry, target, train_step=train_step)
        self._shelves.of(entry.task, target).add(entry)
        return status

    def _discard(self, entry: Entry, reason: DiscardReason, train_step: int, detail: str = "") -> None:
        self._move(entry, GroupState.DISCARDED, train_step=train_step, reason=reason, detail=detail)
        self.tokens.discard(entry, reason.value)
        del self._entries[entry.group_id]

    def _move(
        self,
        entry: Entry,
        target: GroupState,
        *,
        train_step: int = 0,
        reason: DiscardReason | None = None,
        group: Group | None = None,
        cursor: int | None = None,
        detail: str = "",
    ) -> None:
        """`group` is given when its content is new."""
        transition = Transition(
            entry.group_id,
            entry.task,
            entry.state,
            target,
            train_step,
            reason,
            entry.sequence,
            entry.draw,
            entry.tokens,
            entry.statuses,
            entry.take_waste(),
            detail,
            entry.made,
        )
        self._lifecycle.move(transition, lambda: entry.story)
        entry.enter(target, train_step)
        self._storage.record(transition, group, cursor)


def _failures(group: Group) -> str:
    """What went wrong, in the rollouts' own words; each once."""
    said = {f"{rollout.error.reason}: {rollout.error.message}": None for rollout in group if rollout.error is not None}
    return "; ".join(said)[:MAX_DETAIL]
