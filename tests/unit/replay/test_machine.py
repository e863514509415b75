"""Random runs of the buffer over a ledger, with crashes: memory and file agree after each."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from penstock.replay import WAITING, DiscardReason, GroupState, Ledger, ReplayBuffer, StaleRule
from penstock.rollout import Group, Status

S, G = Status, GroupState
RULES = {"sums": StaleRule(2), "code": StaleRule(2, 1), "drop": StaleRule(1, discard_expired=True)}
TASKS = sorted(RULES)
EXAMPLES = 40


class Known(msgspec.Struct):
    """What the test knows of a group."""

    group: Group
    state: GroupState = G.RUNNING
    step: int = 0
    durable: Group = []
    """Its content when it was last stored."""


class Run(RuleBasedStateMachine):
    groups: Any
    new_disk: Any
    copy_run: Any

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.lives = 0
        self.buffer = self.open()
        self.known: dict[str, Known] = {}
        self.drawn = dict.fromkeys(TASKS, 0)
        self.step = 1
        self.pruned = 0

    def home(self) -> Path:
        return Path(self.directory.name) / str(self.lives)

    def open(self) -> ReplayBuffer:
        storage = Ledger.open(self.home(), disk=self.new_disk(), threaded=False)
        return ReplayBuffer(order="stalest_first", storage=storage)

    def teardown(self) -> None:
        asyncio.run(self.buffer.close())
        self.directory.cleanup()

    def running(self) -> list[Known]:
        return [known for known in self.known.values() if known.state is G.RUNNING]

    @rule(task=st.sampled_from(TASKS))
    def draw(self, task: str) -> None:
        group = self.groups.new(self.drawn[task], task)
        self.drawn[task] += 1
        self.buffer.draw(group, self.drawn[task])
        self.known[group[0].group_id] = Known(group)

    @precondition(lambda self: self.running())
    @rule(
        data=st.data(),
        tokens=st.integers(0, 3),
        behind=st.integers(0, 2),
        how=st.sampled_from([S.COMPLETED, S.COMPLETED, S.ABORTED, S.MAX_TRIES]),
        fail_first=st.booleans(),
    )
    def put(self, data: st.DataObject, tokens: int, behind: int, how: Status, fail_first: bool) -> None:
        known = data.draw(st.sampled_from(self.running()))
        group, task = known.group, known.group[0].task_name
        for rollout in group:
            if rollout.status is S.EXPIRED:
                self.buffer.forget_response(rollout, "re_rolled")
            if rollout.status is not S.COMPLETED:
                rollout.status = S.INIT
        if fail_first:
            played = [rollout for rollout in group if rollout.status is S.INIT][:1]
            self.groups.play(played, tokens=2)
            for rollout in played:
                self.buffer.forget_response(rollout, "retried")
                rollout.status = S.INIT
        self.groups.play(group, tokens=tokens, model_step=max(0, self.step - 1 - behind), statuses=[how, S.COMPLETED])
        self.buffer.tokens.check()
        status = self.buffer.put(group, task, model_step=0, current_train_step=self.step, stale_threshold=RULES[task])
        asyncio.run(self.buffer.flush())
        known.state = G.DISCARDED if status is S.EXPIRED and RULES[task].discard_expired else WAITING[status]
        known.durable = copy.deepcopy(group)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), reason=st.sampled_from(DiscardReason))
    def discard(self, data: st.DataObject, reason: DiscardReason) -> None:
        known = data.draw(st.sampled_from(self.running()))
        self.buffer.discard(known.group, known.group[0].task_name, reason, train_step=self.step)
        asyncio.run(self.buffer.flush())
        known.state = G.DISCARDED

    @rule(task=st.sampled_from(TASKS), status=st.sampled_from([S.ABORTED, S.EXPIRED, S.MAX_TRIES]))
    def get(self, task: str, status: Status) -> None:
        for group in self.buffer.get(1, task, status):
            known = self.known[group[0].group_id]
            assert known.state is WAITING[status]
            assert not known.durable or [r.response for r in group] == [r.response for r in known.durable]
            known.group, known.state = group, G.RUNNING
            known.durable = copy.deepcopy(group)

    @rule(task=st.sampled_from(TASKS), n=st.integers(1, 3), trained=st.sampled_from([True, True, False]))
    def train(self, task: str, n: int, trained: bool) -> None:
        n = min(n, self.buffer.count(task, S.COMPLETED))
        batch = self.buffer.take_batch({task: n}, train_step=self.step)[task]
        for group in batch:
            known = self.known[group[0].group_id]
            assert known.state is G.COMPLETED
            assert group == known.durable
            known.state, known.step = G.TRAINED if trained else G.COMPLETED, self.step
        if trained:
            self.buffer.commit(self.step)
            self.step += 1
            self.refresh()
        else:
            assert sum(self.buffer.return_lease(self.step).values()) == n

    @rule(task=st.sampled_from(TASKS))
    def lease(self, task: str) -> None:
        """A batch that a crash will find leased. Committed by the next train step of this number, if it comes first."""
        if self.buffer.count(task, S.COMPLETED):
            (group,) = self.buffer.take_batch({task: 1}, train_step=self.step)[task]
            self.known[group[0].group_id].state = G.LEASED
            self.restart(self.step - 1)

    def refresh(self) -> None:
        self.buffer.refresh_staleness(self.step)
        for known in self.known.values():
            if known.state in (G.COMPLETED, G.ABORTED):
                rule_of = RULES[known.group[0].task_name]
                rule_of.mark_expired(known.durable, self.step)
                statuses = {rollout.status for rollout in known.durable}
                if S.EXPIRED in statuses and not statuses & {S.ABORTED, S.MAX_TRIES}:
                    known.state = G.DISCARDED if rule_of.discard_expired else G.EXPIRED

    @rule(back=st.integers(0, 3))
    def crash(self, back: int) -> None:
        self.restart(max(self.pruned, self.step - 1 - back, 0))

    def restart(self, checkpoint_step: int) -> None:
        before, tokens = self.home(), self.buffer.tokens
        self.lives += 1
        self.copy_run(before, self.home())
        asyncio.run(self.buffer.close())
        self.buffer = self.open()
        restored = self.buffer.restore(checkpoint_step, RULES)
        self.step = checkpoint_step + 1
        for known in self.known.values():
            if known.state is G.RUNNING:
                known.state = G.ABORTED
                for rollout in known.durable:
                    if rollout.status is not S.COMPLETED:
                        if rollout.status is S.EXPIRED:
                            rollout.response = type(rollout.response)()
                        rollout.status = S.ABORTED
            elif known.state is G.LEASED or (known.state is G.TRAINED and known.step > checkpoint_step):
                known.state = G.COMPLETED
        assert restored.cursors == {task: n for task, n in self.drawn.items() if n}
        trained = Counter(k.group[0].task_name for k in self.known.values() if k.state is G.TRAINED)
        assert +Counter(restored.trained) == trained
        assert self.buffer.tokens.generated == tokens.generated
        wasted = Counter(tokens.wasted)
        made_again = self.buffer.tokens.wasted["re_rolled"]
        assert made_again >= wasted["re_rolled"]
        wasted["re_rolled"] = made_again
        assert self.buffer.tokens.wasted == wasted
        self.agrees()
        self.refresh()

    @rule(keep=st.integers(1, 2))
    def prune(self, keep: int) -> None:
        self.pruned = max(self.pruned, self.step - 1 - keep)
        asyncio.run(self.buffer.prune(self.pruned))

    @invariant()
    def agrees(self) -> None:
        self.buffer.conservation().check()
        self.buffer.tokens.check()
        for task in TASKS:
            states = Counter(k.state for k in self.known.values() if k.group[0].task_name == task)
            assert {s: n for s, n in self.buffer.conservation(task).states.items() if n} == states


def test_memory_and_ledger_agree_through_any_run_with_any_crashes(groups: Any, new_disk: Any, copy_run: Any) -> None:
    class Mine(Run):
        pass

    Mine.groups, Mine.new_disk, Mine.copy_run = groups, new_disk, staticmethod(copy_run)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Mine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=30,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
