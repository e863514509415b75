"""Conversations drawn at random, over the chat templates of eight model families."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from chat_families import FAMILIES, tokenizer_of
from random_conversations import conversed, text, trained
from session_clients import Talk, places, user

from penstock.rollout import unpack_ids
from penstock.testing import run_virtual

PER_FAMILY = 64
"""512 in all; a fifth of them in every tier."""


@pytest.mark.sized
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_ids_are_those_that_the_engine_saw_and_each_answer_is_trained_once(
    family: str, size: Callable[[int, int], int]
) -> None:
    for seed in range(size(PER_FAMILY // 5, PER_FAMILY)):
        talk, client = conversed(family, seed, steps=6)
        talk.require_exact()
        masks = trained(talk.rollout)
        assert len(masks) == client.samples + client.lost
        # One that was lost counts when a client says the same words all the same.
        assert client.samples <= sum(masks) <= client.samples + client.lost


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_model_sees_is_what_its_template_writes(family: str) -> None:
    """Under templates that write earlier turns as they were, word for word."""
    tokenizer = tokenizer_of(family)
    for seed in range(8):
        rng = random.Random(seed)
        words = [text(rng).replace("<think>", "").replace("</think>", "").strip() or "so" for _ in range(8)]
        said = [f" {word}" if family == "mistral" else word for word in words[4:]]

        async def main(words: list[str] = words, said: list[str] = said) -> Talk:
            talk = Talk(*said, family=family)
            line = [user("hello")]
            for word in words[:4]:
                line.append(await talk.say(*line))
                request, _ = talk.engine.asked[-1]
                seen = talk.text(unpack_ids(request.prompt_ids).tolist())
                assert seen == tokenizer.render_text(line[:-1])
                line.append(user(word))
            return talk

        run_virtual(main())


@pytest.mark.sized
def test_two_hundred_branching_sessions_train_every_sampled_token_exactly_once(
    size: Callable[[int, int], int],
) -> None:
    sampled = counted = 0
    for seed in range(size(30, 200)):
        talk, _ = conversed("qwen2.5", seed, steps=5)
        sampled += sum(len(completion.ids) // 4 for _, completion in talk.engine.asked)
        masks = trained(talk.rollout)
        unheard = sum(
            end - begin
            for (turn, (_, begin, end)), mask in zip(
                [place for place in places(talk.rollout) if place[0].kind == "generate"], masks, strict=True
            )
            if not mask
        )
        counted += sum(sum(segment.tokens.mask) for segment in talk.rollout.segments) + unheard
    assert sampled == counted > 1000


def test_a_linear_conversation_of_any_length_is_one_segment() -> None:
    async def main(turns: int) -> int:
        talk = Talk(*["so"] * turns)
        line = [user("hello")]
        for _ in range(turns):
            line += [await talk.say(*line), user("and?")]
        return len(talk.rollout.segments)

    assert [run_virtual(main(turns)) for turns in (1, 3, 20)] == [1, 1, 1]
