"""What each way to hold a conversation leaves on record: the exact segments, and nothing trained twice."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import tokenizer_of
from session_clients import Talk, as_message, played, receive, system, user

from penstock.agent_loop.session.session import SessionRules
from penstock.rollout import ROOT

from .segment_texts import CALL, HELLO, START, TOOL, TOOLS_SHOWN, asked, given, said

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


def test_a_completion_goes_on_from_the_recorded_tokens_of_its_text() -> None:
    async def main(talk: Talk) -> None:
        first = await receive(talk.complete("Once upon"))
        await receive(talk.complete("Once upon" + first.content + " and then"))
        await receive(talk.complete([*talk.tokenizer.encode("Once"), 5]))

    talk = played([" a time", " it ended", "x"], main)
    assert [(parent, before) for parent, before, _ in talk.shape] == [(ROOT, ""), (0, "Once upon a time"), (0, "Once")]
    assert talk.shape[1][2] == [(" and then", False), said(" it ended")]
