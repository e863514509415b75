"""Answers that are cut, lost, too late or refused: what is trained of them, and what the client is told."""

from __future__ import annotations

import asyncio

import pytest
from session_clients import Kept, Talk, as_message, assistant, played, receive, user

from penstock.agent_loop.session.requests import Refused
from penstock.agent_loop.session.session import SessionRules
from penstock.ports import FinishedTurn
from penstock.rollout import ROOT, SampleParams
from penstock.testing import run_virtual

from .segment_texts import HELLO, asked, given, said

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


def test_a_request_after_the_rollout_was_played_to_its_end_is_told_that_the_session_has_ended() -> None:
    async def main(talk: Talk) -> None:
        await talk.say(user("hello"))
        talk.transcript.doing = ""
        with pytest.raises(Refused) as refused:
            talk.ask(user("something else"))
        assert refused.value.code == "session_ended"

    played(["one"], main)
