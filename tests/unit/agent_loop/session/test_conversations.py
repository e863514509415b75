"""What each way to hold a conversation leaves on record: the exact segments, and nothing trained twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chat_families import tokenizer_of
from session_clients import Kept, Talk, as_message, assistant, played, receive, system, user

from penstock.agent_loop.session.requests import Refused
from penstock.agent_loop.session.session import SessionRules
from penstock.ports import FinishedTurn
from penstock.replay.codec import encode_turn
from penstock.replay.schema import TurnRow
from penstock.replay.turns import put_back_turns
from penstock.rollout import ROOT, RolloutState, SampleParams
from penstock.testing import run_virtual

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
TOOLS_SHOWN = (
    'system\n# Tools\n<tools>\n{"type": "function", "function": {"name": "add", "description": "Adds.", '
    '"parameters": {"type": "object"}}}\n</tools><|im_end|>\n'
)
START = "<|im_start|>"
HELLO = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1.0}}\n</tool_call>'


def said(text: str) -> tuple[str, bool]:
    """By the model."""
    return text + "<|im_end|>", True


def given(text: str) -> tuple[str, bool]:
    """By somebody else."""
    return text, False


def asked(text: str) -> tuple[str, bool]:
    """Between an answer and the next: the newline after the end of the turn, and the user's words."""
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", False


# One line.


def test_a_conversation_that_only_grows_is_one_segment() -> None:
    async def main(talk: Talk) -> None:
        one = await talk.say(user("hello"))
        two = await talk.say(user("hello"), one, user("more"))
        await talk.say(user("hello"), one, user("more"), two, user("and more"))

    talk = played(["one", "two", "three"], main)
    assert talk.shape == [
        (ROOT, HELLO, [said("one"), asked("more"), said("two"), asked("and more"), said("three")]),
    ]


def test_text_that_would_be_tokenised_otherwise_when_joined_keeps_its_tokens() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    ids = [i for text in ("as", "sistant", "\n", "\n", "<|im_end|>") for i in tokenizer.encode(text)]
    assert ids != tokenizer.encode("assistant\n\n<|im_end|>")

    async def main(talk: Talk) -> None:
        answer = await talk.say(user("hello"))
        await talk.say(user("hello"), answer, user("\n\nassistant"))

    talk = played([ids, "two"], main)
    assert talk.shape == [(ROOT, HELLO, [said("assistant\n\n"), asked("\n\nassistant"), said("two")])]
    assert talk.rollout.response_ids[: len(ids)].tolist() == ids


def test_the_answer_of_a_tool_follows_without_a_seam() -> None:
    async def main(talk: Talk) -> None:
        answer = await talk.say(user("hello"), tools=[TOOL])
        (call,) = answer["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"b": 2, "a": 1.0}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        # As a client in another language writes them again.
        call["function"]["arguments"] = '{"a":1,"b":2}'
        await talk.say(user("hello"), answer, result, tools=[TOOL])

    talk = played([CALL, "It is 3."], main)
    result = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert talk.shape == [
        (ROOT, START, [given(TOOLS_SHOWN + HELLO), said(CALL), given(result), said("It is 3.")]),
    ]


# Other lines.


def test_a_changed_system_message_opens_a_branch() -> None:
    async def main(talk: Talk) -> None:
        one = await talk.say(system("old"), user("hello"))
        await talk.say(system("new"), user("hello"), one, user("again"))

    talk = played(["one", "two"], main)
    again = "new<|im_end|>\n" + HELLO + said("one")[0] + asked("again")[0]
    assert talk.shape == [
        (ROOT, START, [given("system\nold<|im_end|>\n" + HELLO), said("one")]),
        (0, "system\n", [given(again), said("two")]),
    ]


def test_an_edited_history_goes_on_from_the_last_answer_before_the_edit() -> None:
    async def main(talk: Talk) -> None:
        one = await talk.say(user("hello"))
        two = await talk.say(user("hello"), one, user("more"))
        await talk.say(user("hello"), one, user("less"), two, user("again"))

    talk = played(["one", "two", "three"], main)
    edited = "less<|im_end|>\n<|im_start|>assistant\n" + said("two")[0] + asked("again")[0]
    assert talk.shape == [
        (ROOT, HELLO, [said("one"), asked("more"), said("two")]),
        (0, said("one")[0] + "\n<|im_start|>user\n", [given(edited), said("three")]),
    ]


def test_a_compacted_conversation_is_a_branch_from_what_it_kept() -> None:
    async def main(talk: Talk) -> None:
        one = await talk.say(system("be brief"), user("hello"))
        two = await talk.say(system("be brief"), user("hello"), one, user("more"))
        await talk.say(system("be brief"), user("summary: one, two"))
        assert two["content"] == "two"

    talk = played(["one", "two", "three"], main)
    rules = "system\nbe brief<|im_end|>\n"
    assert talk.shape == [
        (ROOT, START, [given(rules + HELLO), said("one"), asked("more"), said("two")]),
        (
            0,
            rules + "<|im_start|>user\n",
            [given("summary: one, two<|im_end|>\n<|im_start|>assistant\n"), said("three")],
        ),
    ]


def test_two_interleaved_sub_agents_are_two_lines_side_by_side() -> None:
    async def main(talk: Talk) -> None:
        lines = {name: [system(name), user("hello")] for name in ("a", "b")}
        for question in ("and?", "so?"):
            replies = {name: talk.ask(*line) for name, line in lines.items()}
            for name, line in lines.items():
                line += [as_message(await receive(replies[name])), user(question)]

    talk = played(["a1", "b1", "a2", "b2"], main)
    assert talk.shape == [
        (ROOT, START, [given("system\na<|im_end|>\n" + HELLO), said("a1"), asked("and?"), said("a2")]),
        (ROOT, START, [given("system\nb<|im_end|>\n" + HELLO), said("b1"), asked("and?"), said("b2")]),
    ]


def test_changed_tools_open_a_branch_because_the_prompt_shows_them() -> None:
    async def main(talk: Talk) -> None:
        one = await talk.say(user("hello"), tools=[TOOL])
        await talk.say(user("hello"), one, user("more"))

    talk = played(["one", "two"], main)
    assert talk.shape == [
        (ROOT, START, [given(TOOLS_SHOWN + HELLO), said("one")]),
        (ROOT, HELLO, [given(said("one")[0] + asked("more")[0]), said("two")]),
    ]


def test_a_changed_model_opens_a_branch() -> None:
    async def main(talk: Talk) -> None:
        one = await talk.say(user("hello"))
        await talk.say(user("hello"), one, user("more"), model="another")

    talk = played(["one", "two"], main)
    # The words are the same, and so are the tokens; the line is not.
    assert talk.shape == [
        (ROOT, HELLO, [said("one")]),
        (0, said("one")[0], [asked("more"), said("two")]),
    ]


# The same again.


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


def test_an_answer_shorter_than_the_run_allows_is_refused() -> None:
    async def main() -> None:
        params = SampleParams(max_tokens=50, min_tokens=8)
        with pytest.raises(Refused, match="max_tokens is 4; the run's answers have at least 8") as refused:
            Talk(params=params).ask(user("hello"), max_tokens=4)
        assert refused.value.code == "invalid_request"
        with pytest.raises(Refused, match="7 tokens are left") as refused:
            Talk(params=params, rules=SessionRules(max_tokens=7)).ask(user("hello"))
        assert refused.value.code == "session_limit"

    run_virtual(main())


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


# Answers that end otherwise.


def test_an_answer_cut_by_its_length_ends_its_line() -> None:
    async def main(talk: Talk) -> None:
        reply = talk.ask(user("hello"), max_tokens=2)
        cut = as_message(await receive(reply))
        assert reply.result().cut
        await talk.say(user("hello"), cut, user("go on"))

    talk = played(["one two three", "two"], main)
    (first, second) = talk.shape
    assert first == (ROOT, HELLO, [(first[2][0][0], True)])
    # What it said is context of the next line, under an end of turn that the model did not write.
    assert (second[0], second[2][-1]) == (0, said("two"))
    assert second[1] + second[2][0][0] == first[2][0][0] + "<|im_end|>" + asked("go on")[0]


def test_what_follows_a_stop_string_follows_the_words_before_it() -> None:
    async def main(talk: Talk) -> None:
        one = await talk.say(user("hello"), stop=["\nObservation:"])
        assert one["content"] == "look"
        await talk.say(user("hello"), one, user("seen"))

    talk = played(["look\nObservation:", "two"], main, end="")
    assert talk.shape == [
        (ROOT, HELLO, [("look\nObservation:", True)]),
        (0, "look", [("<|im_end|>" + asked("seen")[0], False), ("two", True)]),
    ]


def test_an_answer_whose_delivery_broke_is_not_trained() -> None:
    async def main(talk: Talk) -> None:
        lost = talk.ask(user("hello"))
        await lost.changed.wait_until(lambda: lost.is_over)
        await talk.say(user("hello"))

    talk = played(["lost", "one"], main)
    assert talk.shape == [(ROOT, HELLO, [given("lost<|im_end|>")]), (ROOT, HELLO, [said("one")])]


def test_an_answer_whose_delivery_broke_is_trained_when_a_later_request_contains_it() -> None:
    async def main(talk: Talk) -> None:
        lost = talk.ask(user("hello"))
        await lost.changed.wait_until(lambda: lost.is_over)
        await talk.say(user("hello"), assistant("found"), user("more"))

    talk = played(["found", "two"], main)
    assert talk.shape == [(ROOT, HELLO, [said("found"), asked("more"), said("two")])]


def test_an_answer_that_is_still_made_when_the_session_ends_leaves_nothing_to_train() -> None:
    async def main() -> Talk:
        talk = Talk("one", "never", tokens_per_s=1.0)
        one = await talk.say(user("hello"))
        begun = talk.ask(user("hello"), one, user("more"))
        await asyncio.sleep(2)
        waiting = talk.ask(user("hello"), one, user("more"))
        await talk.over()
        assert begun.failed and waiting.failed
        return talk

    assert run_virtual(main()).shape == [
        (ROOT, HELLO, [said("one"), asked("more")]),
        (0, said("one")[0] + asked("more")[0], []),
    ]


class Slow(Kept):
    """A disk that does not answer."""

    async def append(self, turn: FinishedTurn, *, durable: bool = False) -> None:
        await super().append(turn)
        if durable:
            await asyncio.Event().wait()


def test_an_answer_that_is_still_written_to_disk_when_the_session_ends_is_not_trained() -> None:
    async def main() -> Talk:
        talk = Talk("unheard", kept=Slow())
        reply = talk.ask(user("hello"))
        await asyncio.sleep(60)
        await talk.over()
        assert reply.failed
        return talk

    assert run_virtual(main()).shape == [(ROOT, HELLO, [given("unheard<|im_end|>")])]


# Completions of a text.


def test_of_completions_with_the_same_words_the_one_that_was_received_goes_on() -> None:
    async def main(talk: Talk) -> None:
        lost = talk.complete("hello")
        await lost.changed.wait_until(lambda: lost.is_over)
        heard = talk.complete("hello")
        await receive(heard)
        await receive(talk.complete("hellosame and"))
        assert lost.recorded is not None and not lost.recorded.received

    played(["same", "same", "three"], main)


def test_a_request_after_the_rollout_was_played_to_its_end_is_told_that_the_session_has_ended() -> None:
    async def main(talk: Talk) -> None:
        await talk.say(user("hello"))
        talk.transcript.doing = ""
        with pytest.raises(Refused) as refused:
            talk.ask(user("something else"))
        assert refused.value.code == "session_ended"

    played(["one"], main)


def test_a_completion_goes_on_from_the_recorded_tokens_of_its_text() -> None:
    async def main(talk: Talk) -> None:
        first = await receive(talk.complete("Once upon"))
        await receive(talk.complete("Once upon" + first.content + " and then"))
        await receive(talk.complete([*talk.tokenizer.encode("Once"), 5]))

    talk = played([" a time", " it ended", "x"], main)
    assert [(parent, before) for parent, before, _ in talk.shape] == [(ROOT, ""), (0, "Once upon a time"), (0, "Once")]
    assert talk.shape[1][2] == [(" and then", False), said(" it ended")]


# How strictly.


@pytest.mark.parametrize(
    ("strictness", "arguments", "segments"),
    [
        ("exact", '{"b": 2, "a": 1.0}', 1),
        ("exact", '{"a":1,"b":2}', 2),
        ("json-arguments", '{"a":1,"b":2}', 1),
        ("json-arguments", '{"a": 2, "b": 2}', 2),
        ("role-and-content", '{"a": 2, "b": 2}', 1),
    ],
)
def test_how_strictly_a_history_must_match_is_a_choice(strictness: Any, arguments: str, segments: int) -> None:
    async def main(talk: Talk) -> None:
        answer = await talk.say(user("hello"), tools=[TOOL])
        (call,) = answer["tool_calls"]
        call["function"]["arguments"] = arguments
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        await talk.say(user("hello"), answer, result, tools=[TOOL])

    talk = played([CALL, "3"], main, rules=SessionRules(strictness=strictness))
    assert len(talk.shape) == segments


# Limits.


def test_turns_tokens_and_the_context_are_limited_per_session() -> None:
    async def main() -> None:
        talk = Talk("one", rules=SessionRules(max_turns=1))
        await talk.say(user("hello"))
        with pytest.raises(Refused, match="its 1 turns") as refused:
            talk.ask(user("hello"))
        assert (refused.value.status, refused.value.code, talk.session.cut) == (400, "session_limit", True)

        talk = Talk("one two three four", rules=SessionRules(max_tokens=3))
        reply = talk.ask(user("hello"))
        assert (await receive(reply)).cut and reply.result().completion_tokens == 3
        with pytest.raises(Refused, match="its 3 tokens"):
            talk.ask(user("hello"))

        talk = Talk("one two three four", rules=SessionRules(context=20))
        reply = talk.ask(user("hello"))
        finished = await receive(reply)
        assert finished.cut and finished.prompt_tokens + finished.completion_tokens == 20
        with pytest.raises(Refused, match="the context is 20") as refused:
            talk.ask(user("hello and very much more than that, many words"))
        assert refused.value.code == "context_length_exceeded"
        assert len(talk.rollout.turns) == 1

    run_virtual(main())


@pytest.mark.parametrize(("limit", "lengths"), [(12, [8, 4]), (16, [8, 8]), (20, [8, 8, 4]), (9, [8, 1]), (8, [8])])
def test_answers_that_are_made_at_once_share_what_the_session_may_write(limit: int, lengths: list[int]) -> None:
    async def main() -> None:
        words = "one two three four five six seven eight nine ten"
        talk = Talk(*[words] * 4, params=SampleParams(max_tokens=8), rules=SessionRules(max_tokens=limit))
        replies = [talk.ask(user(name)) for name in ("a", "b", "c", "d")]
        for reply in replies:
            await reply.changed.wait_until(lambda reply=reply: reply.is_over)  # type: ignore[misc]
        made = [reply.result().completion_tokens for reply in replies if not reply.failed]
        assert made == lengths
        for reply in replies[len(lengths) :]:
            with pytest.raises(Refused, match="0 tokens are left") as refused:
                reply.result()
            assert (refused.value.status, refused.value.code) == (400, "session_limit")
        assert talk.session.cut and not talk.session.fatal.done()
        rollout = await talk.over()
        assert sum(turn.num_tokens for turn in rollout.turns if turn.kind == "generate") == limit

    run_virtual(main())


def test_an_answer_waits_for_one_that_may_write_all_the_rest_and_seldom_does() -> None:
    async def main() -> None:
        talk = Talk("one", "two", params=SampleParams(max_tokens=100), rules=SessionRules(max_tokens=100))
        replies = [talk.ask(user("a")), talk.ask(user("b"))]
        answers = [await receive(reply) for reply in replies]
        assert [answer.content for answer in answers] == ["one", "two"]
        assert not any(answer.cut for answer in answers) and not talk.session.cut

    run_virtual(main())


def test_what_a_session_keeps_of_a_request_has_not_its_conversation() -> None:
    async def main() -> None:
        talk = Talk("one", "two")
        reply = talk.ask(user("hello"), tools=[TOOL])
        assert (reply.asking.messages, reply.asking.tools, reply.asking.model) == ((), (), "m")
        assert talk.ask(user("hello"), tools=[TOOL], retried=True) is reply
        await receive(reply)

    run_virtual(main())


# Played again.


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
