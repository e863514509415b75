from __future__ import annotations

import asyncio

import pytest

from penstock.replay import Conservation, GroupState, ReplayBuffer, StaleRule, Transition
from penstock.rollout import NO_TOKENS, Group, Prompt, RolloutState, Status
from penstock.testing import (
    Batch,
    BrokenHistory,
    Event,
    History,
    RecordingStorage,
    Restart,
    ScriptedWorld,
    check_history,
    run_virtual,
)

S = GroupState
PATH = (S.RUNNING, S.COMPLETED, S.LEASED, S.TRAINED)


def events(group_id: str, *states: GroupState, cursor: int = 1, step: int = 1, made_by: int = 0) -> list[Event]:
    """A group's way through these states."""
    made = []
    before = None
    for state in states:
        move = Transition(group_id, "t", before, state, step)
        versions = (((made_by, 5),),) if state is S.COMPLETED and before is S.RUNNING else None
        made.append(Event(move, cursor if before is None else None, versions))
        before = state
    return made


def trained(step: int, *group_ids: str) -> Batch:
    return Batch(step, group_ids, trained=True)


def test_a_good_history_has_no_findings() -> None:
    history = History(events("a", *PATH) + events("b", S.RUNNING, S.COMPLETED, cursor=2), [trained(1, "a")])
    found = check_history(history, rules={"t": StaleRule(1)}, held={"b"})
    assert found.problems() == []
    found.require_none()


def test_a_finished_group_that_is_gone_is_lost() -> None:
    found = check_history(History(events("a", S.RUNNING, S.COMPLETED)), held=set())
    assert (found.lost, found.skipped) == (["a was completed and is gone"], [])
    with pytest.raises(BrokenHistory, match="lost: a was completed"):
        found.require_none()


def test_a_drawn_group_that_is_gone_is_skipped() -> None:
    found = check_history(History(events("a", S.RUNNING)), held=set())
    assert (found.lost, found.skipped) == ([], ["a was running and is gone"])


def test_a_discarded_group_is_neither() -> None:
    discarded = events("a", S.RUNNING, S.DISCARDED)
    assert check_history(History(discarded), held=set()).problems() == []


def test_a_hole_in_the_draws_is_skipped_and_a_repeated_draw_is_doubled() -> None:
    hole = check_history(History(events("a", S.RUNNING, cursor=1) + events("b", S.RUNNING, cursor=4)))
    assert hole.skipped == ["t: draws 1 to 2 have no group"]
    twice = check_history(History(events("a", S.RUNNING, cursor=1) + events("b", S.RUNNING, cursor=1)))
    assert twice.doubled == ["b: draw 0 was made before"]


def test_called_trained_without_a_trainer_is_lost() -> None:
    found = check_history(History([*events("a", *PATH), *events("b", *PATH, cursor=2)], [trained(1, "a")]))
    assert found.lost == ["b is recorded as trained, but no consumer trained it"]


def test_one_group_in_two_trained_steps_is_doubled() -> None:
    found = check_history(History(events("a", *PATH), [trained(1, "a"), trained(2, "a")]))
    assert found.doubled == ["a was trained in steps 1 and 2"]


def test_a_trained_group_that_waits_again_is_doubled_unless_the_step_was_undone() -> None:
    again = events("a", *PATH, S.COMPLETED)
    assert check_history(History(again, [trained(1, "a")])).doubled == [
        "a was trained in step 1 and is completed again"
    ]
    assert check_history(History(again, [trained(1, "a"), Restart(0)])).problems() == []
    whole = events("a", *PATH, S.COMPLETED, S.LEASED, S.TRAINED)
    assert check_history(History(whole, [trained(1, "a"), Restart(0), trained(1, "a")])).problems() == []


def test_a_step_that_is_trained_twice_is_doubled() -> None:
    found = check_history(History([], [trained(1, "a"), trained(1, "b")]))
    assert found.doubled[0] == "train step 1 was trained twice"


def test_a_batch_given_back_is_not_trained() -> None:
    history = History(events("a", S.RUNNING, S.COMPLETED, S.LEASED, S.COMPLETED), [Batch(1, ("a",), trained=False)])
    assert check_history(history, held={"a"}).problems() == []


@pytest.mark.parametrize(("step", "made_by", "bad"), [(3, 1, False), (4, 1, True), (1, 5, False)])
def test_staleness_is_counted_at_the_step_of_the_lease(step: int, made_by: int, bad: bool) -> None:
    history = History(events("a", S.RUNNING, S.COMPLETED, S.LEASED, step=step, made_by=made_by))
    assert bool(check_history(history, rules={"t": StaleRule(2)}).stale) is bad


def test_masked_tokens_do_not_count_and_with_none_left_the_rollout_is_stale() -> None:
    def leased_at(step: int) -> list[str]:
        moves = events("a", S.RUNNING, S.COMPLETED, S.LEASED, step=step)
        moves[1] = Event(moves[1].transition, None, (((0, 5), (3, 5)),))
        return check_history(History(moves), rules={"t": StaleRule(9, token_stale_threshold=1)}).stale

    assert not leased_at(4)
    assert leased_at(5)


def test_an_illegal_move_and_one_from_the_wrong_state_are_found() -> None:
    assert check_history(History(events("a", S.RUNNING, S.LEASED))).illegal
    jump = [Event(Transition("a", "t", S.ABORTED, S.RUNNING, 1))]
    assert check_history(History(jump)).illegal == ["a was None: aborted -> running"]


def test_counts_that_differ_from_the_history_are_unbalanced() -> None:
    counted = Conservation(drawn=1, states={S.RUNNING: 0, S.COMPLETED: 1}, discarded={})
    history = History(events("a", S.RUNNING))
    assert check_history(history, conservation={"t": counted}).unbalanced


def test_the_recording_storage_writes_down_versions_and_cursors() -> None:
    async def main() -> History:
        storage = RecordingStorage()
        buffer = ReplayBuffer(storage=storage)
        group: Group = [RolloutState(prompt=Prompt(), task_name="t", group_id="t:0", rollout_id="t:0:0")]
        buffer.draw(group, 1)
        group[0].status = Status.COMPLETED
        group[0].response = NO_TOKENS.append([1, 2], [0.0, 0.0], model_step=4)
        buffer.put(group, "t", model_step=4, current_train_step=5, stale_threshold=1)
        await buffer.flush()
        return storage.history

    first, second = asyncio.run(main()).events
    assert (first.transition.target, first.cursor) == (S.RUNNING, 1)
    assert (second.transition.target, second.steps) == (S.COMPLETED, (((4, 2),),))


def test_a_world_is_a_few_lines_and_says_what_it_finds() -> None:
    world = ScriptedWorld(batch_size=4)
    result = run_virtual(world.manager.produce_batch(4, 1, model_step=0))
    world.check()
    world.history.consumed(1, result.groups, trained=True)
    found = world.findings()
    # Leased and never committed, although the consumer says that it trained them.
    assert len(found.doubled) == 4
