"""The same request again: a retry, another sample, or an agent that is played again after a restart."""

from __future__ import annotations

import pytest
from session_clients import Talk, played, receive, system, user

from penstock.replay.codec import encode_turn
from penstock.replay.schema import TurnRow
from penstock.replay.turns import put_back_turns
from penstock.rollout import ROOT, RolloutState
from penstock.testing import run_virtual

from .segment_texts import CALL, HELLO, TOOL, asked, said

# Within a session.


@pytest.mark.parametrize("stream", [False, True])
def test_a_marked_retry_gets_the_recorded_answer_and_is_trained_once(stream: bool) -> None:
    async def main(talk: Talk) -> None:
        one = await talk.say(user("hello"), stream=stream)
        again = await talk.say(user("hello"), stream=stream, retried=True)
        assert one == again
        await talk.say(user("hello"), again, user("more"))

    talk = played(["one", "two"], main)
    assert talk.shape == [(ROOT, HELLO, [said("one"), asked("more"), said("two")])]


def test_a_marked_retry_joins_the_answer_that_is_being_made() -> None:
    async def main(talk: Talk) -> None:
        first = talk.ask(user("hello"))
        second = talk.ask(user("hello"), retried=True)
        assert first is second
        await receive(second)

    assert played(["one"], main).shape == [(ROOT, HELLO, [said("one")])]


def test_an_identical_request_without_the_mark_is_a_new_sample() -> None:
    async def main(talk: Talk) -> None:
        one = await talk.say(user("hello"))
        other = await talk.say(user("hello"))
        await talk.say(user("hello"), one, user("more"))
        await talk.say(user("hello"), other, user("more"))

    talk = played(["one", "other", "two", "another"], main)
    assert talk.shape == [
        (ROOT, HELLO, [said("one"), asked("more"), said("two")]),
        (ROOT, HELLO, [said("other"), asked("more"), said("another")]),
    ]


def test_of_equal_requests_a_marked_retry_gets_the_answer_that_lost_its_client() -> None:
    async def main(talk: Talk) -> None:
        lost, other = talk.ask(user("hello")), talk.ask(user("hello"))
        talk.session.ended(lost, delivered=False)
        again = talk.ask(user("hello"), retried=True)
        assert again is lost
        for reply in (again, other):
            await receive(reply)

    talk = played(["one", "two"], main)
    assert talk.shape == [(ROOT, HELLO, [said("one")]), (ROOT, HELLO, [said("two")])]


def test_a_turn_that_is_sampled_again_later_is_a_branch_from_before_it() -> None:
    async def main(talk: Talk) -> None:
        one = await talk.say(user("hello"))
        await talk.say(user("hello"), one, user("more"))
        await talk.say(user("hello"), one, user("more"))

    talk = played(["one", "two", "zwei"], main)
    assert talk.shape == [
        (ROOT, HELLO, [said("one"), asked("more"), said("two")]),
        (0, said("one")[0] + asked("more")[0], [said("zwei")]),
    ]


def test_two_samples_of_the_same_words_are_each_trained_once() -> None:
    async def main(talk: Talk) -> None:
        for _ in range(2):
            one = await talk.say(user("hello"))
        await talk.say(user("hello"), one, user("more"))

    talk = played(["same", "same", "two"], main)
    assert talk.shape == [
        (ROOT, HELLO, [said("same")]),
        (ROOT, HELLO, [said("same"), asked("more"), said("two")]),
    ]


def test_what_a_session_keeps_of_a_request_has_not_its_conversation() -> None:
    async def main() -> None:
        talk = Talk("one", "two")
        reply = talk.ask(user("hello"), tools=[TOOL])
        assert (reply.asking.messages, reply.asking.tools, reply.asking.model) == ((), (), "m")
        assert talk.ask(user("hello"), tools=[TOOL], retried=True) is reply
        await receive(reply)

    run_virtual(main())


# After a restart.


def restarted(talk: Talk, rows: int) -> RolloutState:
    """The rollout as a restart finds it after so many turns were on disk."""
    rollout = RolloutState(prompt=talk.rollout.prompt, task_name="t", group_id="t:0", rollout_id="t:0:0")
    kept = [TurnRow(0, 0, t.rollout_id, t.index, encode_turn(t)) for t in talk.kept.turns[:rows]]
    put_back_turns(rollout, kept, model_step=0)
    return rollout


async def branching(talk: Talk) -> None:
    """Two lines from one question, one of them of three turns with a tool, and a sub-agent."""
    one = await talk.say(user("hello"), tools=[TOOL])
    result = {"role": "tool", "tool_call_id": one["tool_calls"][0]["id"], "content": "3"}
    await talk.say(user("hello"), tools=[TOOL])
    line = [user("hello"), one, result]
    line.append(await talk.say(*line, tools=[TOOL]))
    await talk.say(system("sub"), user("task"))
    await talk.say(*line, user("thanks"), tools=[TOOL])


TEXTS = [CALL, "another", "It is 3.", "done", "bye"]


@pytest.mark.parametrize("rows", range(10))
def test_after_a_restart_finished_turns_are_not_asked_again(rows: int) -> None:
    first = played(TEXTS, branching)
    finished = [turn.turn for turn in first.kept.turns[:rows] if turn.turn.kind == "generate"]
    rollout = restarted(first, rows)

    async def main() -> Talk:
        talk = Talk(*TEXTS[len(finished) :], rollout=rollout)
        await branching(talk)
        await talk.over()
        return talk

    again = run_virtual(main())
    assert len(again.engine.asked) == len(TEXTS) - len(finished)
    assert again.shape == first.shape
    assert [turn.text for turn in again.rollout.turns] == [turn.text for turn in first.rollout.turns]


def test_after_a_restart_an_agent_that_does_something_else_trains_what_it_heard_only() -> None:
    first = played(TEXTS, branching)
    rollout = restarted(first, 10)

    async def main() -> Talk:
        talk = Talk("fine", rollout=rollout)
        one = await talk.say(user("hello"), tools=[TOOL])
        await talk.say(user("hello"), one, user("never mind"), tools=[TOOL])
        await talk.over()
        return talk

    talk = run_virtual(main())
    assert [run for _, _, runs in talk.shape for run in runs if run[1]] == [said(CALL), said("fine")]
