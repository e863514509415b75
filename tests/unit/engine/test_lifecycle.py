"""The life of engines as a machine: what each event does, and what no order of events may do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.engine.lifecycle import (
    ALLOWED,
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
from penstock.errors import IllegalTransition

LIMITS = Limits(failures_to_fence=3, start_timeout_s=100.0, unavailable_timeout_s=40.0, recovery_retry_s=2.0)


def active(*names: str, model_step: int = 0) -> Lifecycle:
    life = Lifecycle(names, LIMITS, model_step)
    life.started(0.0)
    for name in names:
        life.recovered(name, model_step)
    return life


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def test_every_state_is_in_the_table_and_only_recovering_and_loading_lead_to_active() -> None:
    assert ALLOWED.keys() == set(EngineState)
    ways = {source for source, targets in ALLOWED.items() if EngineState.ACTIVE in targets}
    assert ways == {EngineState.RECOVERING, EngineState.LOADING}
    assert not ALLOWED[EngineState.CLOSED]
    assert not ALLOWED[EngineState.LEFT], "who left comes back as another"
    assert {source for source, targets in ALLOWED.items() if EngineState.LEFT in targets} == {EngineState.DRAINING}


def test_an_engine_that_joins_serves_only_with_the_published_weights() -> None:
    life = active("a", model_step=3)
    assert life.joined("b") == [Tell("b", EngineState.RECOVERING, "joins"), Recover("b", restart=False)]
    assert life.recovered("b", 0) == [Recover("b", restart=False)], "its own weights are not the published ones"
    life.sync_began(4)
    assert life.recovered("b", 3) == [Recover("b", restart=False)], "nor while a sync is under way"
    life.sync_ended({"a"}, {}, (), 1.0)
    life.recovered("b", 4)
    assert life.state("b") is EngineState.ACTIVE


def test_an_engine_that_drains_is_given_nothing_more_and_no_sync_or_recovery_brings_it_back() -> None:
    life = active("a", "b")
    assert life.drains("a") == [Tell("a", EngineState.DRAINING, "it is to leave")]
    assert life.sync_began(1)[0] == ["b"]
    life.sync_ended({"b"}, {}, (), 1.0)
    assert life.request_failed("a", "late", 1.0, dead=True) == []
    assert life.probe_failed("a", "silent", 1.0, dead=True) == []
    assert life.recovered("a", 1) == []
    assert life.left("a", "drained") == [Tell("a", EngineState.LEFT, "drained"), Fence("a")]
    assert life.left("a", "drained") == []


def test_the_last_engine_in_service_does_not_leave() -> None:
    life = active("a", "b")
    life.fenced("b", "killed", 1.0)
    assert not life.may_leave("a") and life.may_leave("b")
    with pytest.raises(IllegalTransition, match="engine a cannot leave, no other is in service"):
        life.drains("a")
    assert life.state("a") is EngineState.ACTIVE
    life.drains("b")
    assert life.state("b") is EngineState.DRAINING


def test_those_that_left_do_not_keep_hope_alive() -> None:
    life = active("a", "b")
    life.drains("b")
    assert life.given_up is None
    assert kinds(life.fenced("a", "killed", 1.0))[-1] is Alarm
    life.recovering("a", restarted=True)
    effects = life.refused("a", "no model", 2.0)
    assert effects[-1] == GiveUp("a is fenced: no model")


def test_an_illegal_move_tells_the_story_of_the_engine() -> None:
    life = active("a")
    life.fenced("a", "did not pause", 1.0)
    with pytest.raises(
        IllegalTransition, match=r"engine a cannot go from fenced to active .*active -> fenced: did not"
    ):
        life._move(life._engines["a"], EngineState.ACTIVE, "by force")


def test_failed_requests_and_failed_health_checks_are_counted_apart() -> None:
    life = active("a")
    for at in range(2):
        assert kinds(life.request_failed("a", "late", at)) == [Look]
        assert life.probe_failed("a", "silent", at) == []
    life.probe_answered("a", 0, 0, 3.0)
    assert life.state("a") is EngineState.ACTIVE
    effects = life.request_failed("a", "late again", 4.0)
    assert kinds(effects) == [Tell, Fence, Recover, Alarm], "health checks that pass do not excuse failed requests"
    assert life.failure("a") == "late again"


def test_an_answer_ends_a_series_of_failed_requests_only() -> None:
    life = active("a")
    for at in range(2):
        life.request_failed("a", "late", at)
        life.probe_failed("a", "silent", at)
    life.request_answered("a")
    life.request_failed("a", "late", 3.0)
    assert life.state("a") is EngineState.ACTIVE
    assert Fence("a") in life.probe_failed("a", "silent", 4.0)


def test_a_dead_engine_needs_no_series() -> None:
    for event in ("request_failed", "probe_failed"):
        life = active("a", "b")
        effects = getattr(life, event)("a", "killed by SIGKILL", 1.0, dead=True)
        assert effects == [
            Tell("a", EngineState.FENCED, "killed by SIGKILL"),
            Fence("a"),
            Recover("a", restart=True),
        ]


def test_a_health_check_that_was_asked_before_a_sync_ended_proves_nothing() -> None:
    life = active("a")
    life.sync_began(1)
    life.sync_ended({"a"}, {}, (), 1.0)
    assert life.probe_answered("a", served=0, published=0, now=1.0) == []
    assert Fence("a") in life.probe_answered("a", served=0, published=1, now=2.0)


def test_an_engine_that_recovered_during_a_sync_recovers_once_more() -> None:
    life = active("a", "b")
    life.fenced("a", "late", 1.0)
    life.recovering("a", restarted=True)
    names, _ = life.sync_began(1)
    assert names == ["b"]
    assert life.recovered("a", 0) == [Recover("a", restart=False)]
    life.sync_ended({"b"}, {}, (), 2.0)
    assert life.recovered("a", 0) == [Recover("a", restart=False)]
    life.recovered("a", 1)
    assert life.state("a") is EngineState.ACTIVE


def test_an_engine_that_did_not_confirm_is_fenced_and_doubted_until_it_is_restarted_or_loaded() -> None:
    life = active("a", "b")
    life.sync_began(1)
    life.sync_ended({"b"}, {"a": "received other bytes"}, (), 1.0)
    assert life.published == 1 and life.state("a") is EngineState.FENCED
    life.recovering("a", restarted=False)
    assert life.recovered("a", 1) == [Recover("a", restart=False)], "whatever step it names"
    life.loaded("a")
    life.recovered("a", 1)
    assert life.state("a") is EngineState.ACTIVE


def test_weights_that_none_confirmed_leave_those_with_the_old_ones_in_service() -> None:
    life = active("a", "b")
    life.sync_began(1)
    effects = life.sync_ended((), {"a": "refused", "b": "hung"}, {"a"}, 1.0)
    assert life.published == 0
    assert (life.state("a"), life.state("b")) == (EngineState.ACTIVE, EngineState.FENCED)
    assert Fence("b") in effects and Fence("a") not in effects


def test_the_last_engine_is_waited_for_until_the_alarm_and_its_first_restart_beyond() -> None:
    life = active("a")
    assert Alarm(41.0) in life.fenced("a", "killed", 1.0)
    life.recovering("a", restarted=True)
    assert life.clock(41.0) == []
    effects = life.recovery_failed("a", "no such device", 50.0)
    assert GiveUp("a is fenced: no such device") in effects
    life.recovering("a", restarted=True)
    assert life.given_up is not None, "it had its chance"
    life.recovered("a", 0)
    assert life.given_up is None


def test_engines_that_all_refuse_or_wait_for_weights_are_given_up_at_once_and_hoped_for_during_a_sync() -> None:
    life = Lifecycle("ab", LIMITS, 0)
    life.started(0.0)
    assert GiveUp not in kinds(life.refused("a", "no model", 1.0))
    effects = life.lacks_weights("b", 3, 2.0)
    assert kinds(effects)[-1] is GiveUp
    assert life.given_up == (
        "a is fenced: no model; b is recovering: serves model step 3, not 0; only a weight sync can change that"
    )
    names, _ = life.sync_began(4)
    assert names == ["b"] and life.given_up is None


def test_closing_takes_all_work_away_and_is_told_once() -> None:
    life = active("a", "b")
    effects = life.closed()
    assert [effect for effect in effects if isinstance(effect, Fence)] == [Fence("a"), Fence("b")]
    assert GiveUp not in kinds(effects)
    assert life.closed() == [Alarm(None)]


NAMES = ("a", "b", "c")
LATER = ("d", "e", "f")
"""That may join."""
names = st.sampled_from(NAMES + LATER)


class Engines(RuleBasedStateMachine):
    """A world of engines with real weights beside the machine that is told of them."""

    @initialize(kept=st.booleans())
    def start(self, kept: bool) -> None:
        self.life = Lifecycle(NAMES, LIMITS, 0)
        self.now = 0.0
        self.kept = kept
        """Whether published weights can be read again."""
        self.weights = dict.fromkeys(NAMES, (0, True))
        """Of each engine: the step it names, and whether the bytes are those of that step."""
        self.to_recover: dict[str, Recover] = {}
        self.failed = dict.fromkeys(NAMES, False)
        self.gone: set[str] = set()
        self.names = list(NAMES)
        """Of all that ever belonged to it."""
        self.leaving: set[str] = set()
        self.overdue = False
        self.step = 0
        self.syncing: list[str] | None = None
        self.carry_out(self.life.started(self.now))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Recover):
                self.to_recover[effect.engine] = effect
            if isinstance(effect, Tell) and effect.state is EngineState.ACTIVE:
                self.failed = self.failed | {effect.engine: False}
                self.overdue = False

    def serving(self) -> bool:
        return any(self.life.state(name) in IN_SERVICE for name in self.names)

    @precondition(lambda self: len(self.names) < len(NAMES) + len(LATER))
    @rule()
    def one_joins(self) -> None:
        name = LATER[len(self.names) - len(NAMES)]
        self.names.append(name)
        self.weights[name], self.failed[name] = (0, True), False
        self.carry_out(self.life.joined(name))

    @rule(name=names)
    def one_leaves(self, name: str) -> None:
        """Not while a sync is under way: the controller sees to that."""
        if name not in self.names or name in self.leaving or self.syncing is not None:
            return
        if self.life.state(name) in IN_SERVICE and not self.life.may_leave(name):
            with pytest.raises(IllegalTransition):
                self.life.drains(name)
            return
        self.leaving.add(name)
        self.to_recover.pop(name, None)
        self.carry_out(self.life.drains(name))

    @rule(name=names)
    def one_has_left(self, name: str) -> None:
        if name in self.leaving:
            self.carry_out(self.life.left(name, "drained"))
            assert self.life.state(name) is EngineState.LEFT

    @rule(name=names, what=st.sampled_from(["request_failed", "probe_failed"]), dead=st.booleans())
    def fails(self, name: str, what: str, dead: bool) -> None:
        if name not in self.names:
            return
        self.carry_out(getattr(self.life, what)(name, "it failed", self.now, dead=dead))

    @rule(name=names)
    def disobeys(self, name: str) -> None:
        if name not in self.names:
            return
        self.carry_out(self.life.fenced(name, "did not pause", self.now))

    @rule(name=names)
    def is_well(self, name: str) -> None:
        if name not in self.names:
            return
        self.life.request_answered(name)
        self.carry_out(self.life.probe_answered(name, self.weights[name][0], self.life.published, self.now))

    @rule(name=names)
    def forgets_its_weights(self, name: str) -> None:
        if name in self.names and self.life.state(name) is EngineState.ACTIVE:
            self.weights[name] = (self.life.published + 100, False)
            self.carry_out(self.life.probe_answered(name, self.weights[name][0], self.life.published, self.now))
            assert self.life.state(name) is EngineState.FENCED

    @rule(data=st.data(), outcome=st.sampled_from(["well", "fails", "refuses"]), restartable=st.booleans())
    def recovers(self, data: Any, outcome: str, restartable: bool) -> None:
        if not self.to_recover:
            return
        recovery = self.to_recover.pop(data.draw(st.sampled_from(sorted(self.to_recover))))
        name = recovery.engine
        restart = recovery.restart and restartable
        self.carry_out(self.life.recovering(name, restarted=restart))
        if restart:
            self.weights[name] = (0, True)
        if outcome == "fails":
            self.failed[name] = True
            self.carry_out(self.life.recovery_failed(name, "it failed", self.now))
        elif outcome == "refuses":
            self.gone.add(name)
            self.carry_out(self.life.refused(name, "it refused", self.now))
        elif self.weights[name][0] != self.life.published or self.life.is_doubtful(name):
            if self.kept:
                self.weights[name] = (self.life.published, True)
                self.life.loaded(name)
                self.carry_out(self.life.recovered(name, self.life.published))
            else:
                self.carry_out(self.life.lacks_weights(name, self.weights[name][0], self.now))
        else:
            self.carry_out(self.life.recovered(name, self.weights[name][0]))

    @precondition(lambda self: self.syncing is None)
    @rule()
    def begins_a_sync(self) -> None:
        self.step += 1
        self.syncing, effects = self.life.sync_began(self.step)
        self.carry_out(effects)

    @precondition(lambda self: self.syncing is not None)
    @rule(data=st.data())
    def ends_the_sync(self, data: Any) -> None:
        assert self.syncing is not None
        confirmed = data.draw(st.sets(st.sampled_from(self.syncing))) if self.syncing else set()
        failures = {name: "did not confirm" for name in self.syncing if name not in confirmed}
        before = self.life.published
        for name in self.syncing:
            if name in confirmed:
                self.weights[name] = (self.step, True)
            else:
                either = [self.weights[name], (self.step, False), (self.step, True)]
                self.weights[name] = data.draw(st.sampled_from(either))
        kept_old = {name for name in failures if self.weights[name] == (before, True)} if not confirmed else set()
        self.syncing = None
        self.carry_out(self.life.sync_ended(confirmed, failures, kept_old, self.now))
        assert self.life.published == (self.step if confirmed else before)
        if not self.serving():
            self.overdue = False

    @rule()
    def the_alarm_rings(self) -> None:
        self.now += 1000.0
        self.overdue = not self.serving()
        self.carry_out(self.life.clock(self.now))

    @invariant()
    def only_engines_with_the_published_weights_serve(self) -> None:
        for name in self.names:
            if self.life.state(name) is EngineState.ACTIVE:
                assert name not in self.leaving
                assert self.weights[name] == (self.life.published, True)
                assert self.life.loading_step is None

    @invariant()
    def hope_is_given_up_exactly_when_none_may_come_back(self) -> None:
        def may_come_back(name: str) -> bool:
            state = self.life.state(name)
            if name in self.leaving:
                assert state in (EngineState.DRAINING, EngineState.LEFT)
                return False
            if name in self.gone:
                assert state is EngineState.GONE
                return False
            if state is EngineState.AWAITING:
                return self.syncing is not None
            return state in IN_SERVICE or not (self.overdue and self.failed[name])

        assert (self.life.given_up is None) == any(map(may_come_back, self.names))

    @invariant()
    def whatever_does_not_serve_is_brought_back_or_waits_for_a_sync(self) -> None:
        for name in self.names:
            if self.life.state(name) in (EngineState.FENCED, EngineState.RECOVERING):
                assert name in self.to_recover


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=150, stateful_step_count=40)
