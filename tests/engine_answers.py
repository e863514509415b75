"""What every engine answers: tokens, their logprobs, streams and scores."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import numpy as np
import pytest
from engine_subject import LONG, PROMPTS, CharacterTokenizer, Check, Subject, ask, ids_of, logprobs_of, running

from penstock.errors import DataFailure
from penstock.ports import Completion
from penstock.rollout import FinishReason, pack_ids


async def answers_have_one_logprob_and_one_model_step_per_token(subject: Subject) -> None:
    async with running(subject) as engine:
        completion = await engine.generate(ask("a", max_tokens=9))
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(ids_of(completion)) == len(logprobs_of(completion)) == 9
        assert completion.steps == ((0, 9),)
        assert await engine.model_step() == 0
        assert (await engine.stats()).generated_tokens == 9


async def logprobs_are_those_of_the_trainers_own_forward(subject: Subject) -> None:
    async with running(subject) as engine:
        for temperature in (1.0, 0.7, 1.5):
            requests = [
                ask(f"{index}", prompt, seed=index, temperature=temperature, max_tokens=12 + 6 * index)
                for index, prompt in enumerate(PROMPTS)
            ]
            completions = await asyncio.gather(*(engine.generate(request) for request in requests))
            for prompt, completion in zip(PROMPTS, completions, strict=True):
                assert_logprobs(subject, prompt, completion, temperature)


def assert_logprobs(subject: Subject, prompt: Sequence[int], completion: Completion, temperature: float) -> None:
    answer = ids_of(completion)
    table = subject.reference([*prompt, *answer], temperature)[len(prompt) - 1 : -1]
    expected = table[np.arange(len(answer)), answer]
    np.testing.assert_allclose(logprobs_of(completion), expected, atol=1e-4)


async def greedy_answers_take_the_likeliest_token_and_its_logprob_at_temperature_1(subject: Subject) -> None:
    async with running(subject) as engine:
        completion = await engine.generate(ask("g", PROMPTS[2], temperature=0.0, max_tokens=25))
        table = subject.reference([*PROMPTS[2], *ids_of(completion)], 1.0)[len(PROMPTS[2]) - 1 : -1]
        assert ids_of(completion) == table.argmax(-1).tolist()
        np.testing.assert_allclose(logprobs_of(completion), table.max(-1), atol=1e-4)


async def a_seed_decides_the_answer_and_siblings_differ(subject: Subject) -> None:
    async with running(subject) as engine:
        seeds = [3, 4, 5, 3]
        completions = await asyncio.gather(
            *(engine.generate(ask(f"{place}", seed=seed, max_tokens=16)) for place, seed in enumerate(seeds))
        )
        answers = [ids_of(completion) for completion in completions]
        assert answers[0] == answers[3]
        assert len({tuple(answer) for answer in answers}) == 3


async def more_requests_than_slots_are_all_answered(subject: Subject) -> None:
    async with running(subject) as engine:
        requests = [
            ask(f"{index}", PROMPTS[index % len(PROMPTS)], seed=index, max_tokens=1 + index) for index in range(30)
        ]
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert [len(ids_of(completion)) for completion in completions] == list(range(1, 31))
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.generated_tokens == sum(range(1, 31))


async def a_stop_id_ends_the_answer_and_is_kept(subject: Subject) -> None:
    async with running(subject) as engine:
        whole = ids_of(await engine.generate(ask("whole", seed=1, max_tokens=40)))
        stop = whole[10]
        completion = await engine.generate(ask("cut", seed=1, max_tokens=40, stop_token_ids=(stop,)))
        assert completion.finish_reason is FinishReason.STOP
        assert ids_of(completion) == whole[: whole.index(stop) + 1]


async def a_stop_string_ends_the_answer_with_the_token_that_completes_it(subject: Subject) -> None:
    async with running(subject) as engine:
        whole = ids_of(await engine.generate(ask("whole", seed=2, max_tokens=40)))
        text = CharacterTokenizer().decode(whole)
        stop = text[8:11]
        completion = await engine.generate(ask("cut", seed=2, max_tokens=40, stop=("no such text", stop)))
        assert completion.finish_reason is FinishReason.STOP
        assert ids_of(completion) == whole[: text.index(stop) + 3]


async def an_answer_does_not_stop_before_min_tokens(subject: Subject) -> None:
    async with running(subject) as engine:
        whole = ids_of(await engine.generate(ask("whole", seed=1, max_tokens=40)))
        stops = tuple(sorted(set(whole[:3])))
        completion = await engine.generate(
            ask("late", seed=1, max_tokens=40, min_tokens=12, stop_token_ids=stops, stop=("zzz",))
        )
        assert not set(ids_of(completion)[:12]) & set(stops)


async def top_k_1_is_greedy_and_cut_distributions_stay_inside_the_cut(subject: Subject) -> None:
    async with running(subject) as engine:
        greedy = ids_of(await engine.generate(ask("g", temperature=0.0)))
        assert ids_of(await engine.generate(ask("k", seed=5, top_k=1))) == greedy
        assert ids_of(await engine.generate(ask("p", seed=6, top_p=1e-6))) == greedy
        assert ids_of(await engine.generate(ask("m", seed=7, min_p=0.999999))) == greedy
        completion = await engine.generate(ask("k3", seed=8, top_k=3, max_tokens=30))
        table = subject.reference([*PROMPTS[0], *ids_of(completion)], 1.0)[len(PROMPTS[0]) - 1 : -1]
        for row, token in zip(table, ids_of(completion), strict=True):
            assert row[token] >= np.sort(row)[-3] - 1e-4


async def a_continued_answer_equals_the_uninterrupted_one(subject: Subject) -> None:
    async with running(subject) as engine:
        for params in ({"temperature": 0.0}, {"seed": 11}) if subject.numbered_randomness else ({"temperature": 0.0},):
            whole = ids_of(await engine.generate(ask("whole", max_tokens=20, **params)))
            rest = await engine.generate(ask("rest", max_tokens=20, given=whole[:13], **params))
            assert ids_of(rest) == whole[13:]


async def an_answer_that_used_its_budget_gets_no_more_tokens(subject: Subject) -> None:
    async with running(subject) as engine:
        completion = await engine.generate(ask("full", given=[1, 2, 3], max_tokens=3))
        assert (completion.ids, completion.finish_reason) == (b"", FinishReason.LENGTH)


async def requests_that_cannot_be_served_are_data_failures(subject: Subject) -> None:
    async with running(subject) as engine:
        for request in (
            ask("empty", []),
            ask("long", [1] * 10, max_tokens=1 << 24),
            ask("unknown", [1, 96]),
            ask("negative", [-1]),
            ask("unknown answer", given=[5000]),
        ):
            with pytest.raises(DataFailure, match=request.request_id.split()[0]) as failure:
                await engine.generate(request)
            assert failure.value.reason
        assert (await engine.generate(ask("fine"))).finish_reason is FinishReason.LENGTH


async def a_stream_hands_out_the_same_answer_in_pieces(subject: Subject) -> None:
    async with running(subject) as engine:
        request = ask("a", temperature=0.0, max_tokens=40)
        whole = await engine.generate(request)
        pieces = [piece async for piece in engine.stream(request)]
        assert len(pieces) > 3
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [FinishReason.LENGTH]
        assert b"".join(piece.ids for piece in pieces) == whole.ids
        logprobs = np.concatenate([logprobs_of(piece) for piece in pieces])
        np.testing.assert_allclose(logprobs, logprobs_of(whole), atol=1e-4)
        for piece in pieces:
            assert sum(count for _, count in piece.steps) == len(ids_of(piece)) == len(logprobs_of(piece))
        full = [piece async for piece in engine.stream(ask("full", given=[1, 2, 3], max_tokens=3))]
        assert [(piece.ids, piece.finish_reason) for piece in full] == [(b"", FinishReason.LENGTH)]


async def closing_a_stream_drops_its_request(subject: Subject) -> None:
    async with running(subject) as engine:
        async with contextlib.aclosing(engine.stream(ask("dropped", max_tokens=LONG))) as pieces:
            assert (await anext(pieces)).finish_reason is None
        await engine.check_health()
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)


async def scores_are_the_logprobs_of_given_tokens_also_while_paused(subject: Subject) -> None:
    async with running(subject) as engine:
        completion = await engine.generate(ask("a", PROMPTS[2], max_tokens=150))
        ids = [*PROMPTS[2], *ids_of(completion)]
        scores = np.frombuffer(await engine.score(pack_ids(ids)), dtype=np.float32)
        assert len(scores) == len(ids) - 1
        np.testing.assert_allclose(scores[len(PROMPTS[2]) - 1 :], logprobs_of(completion), atol=1e-4)
        await engine.pause_generation()
        again = np.frombuffer(await engine.score(pack_ids(ids)), dtype=np.float32)
        np.testing.assert_allclose(again, scores, atol=1e-4)
        assert await engine.score(pack_ids([5])) == await engine.score(b"") == b""
        await engine.continue_generation()


async def scores_are_those_of_the_trainers_own_forward(subject: Subject) -> None:
    async with running(subject) as engine:
        for ids in ([7, 8], [1, 2, 3] * 70):
            table = subject.reference(ids, 1.0)[:-1]
            scores = np.frombuffer(await engine.score(pack_ids(ids)), dtype=np.float32)
            np.testing.assert_allclose(scores, table[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
        for wrong in ([1, 96], [-1, 2], [1] * (1 << 16)):
            with pytest.raises(DataFailure):
                await engine.score(pack_ids(wrong))


ANSWERS: tuple[Check, ...] = (
    answers_have_one_logprob_and_one_model_step_per_token,
    logprobs_are_those_of_the_trainers_own_forward,
    greedy_answers_take_the_likeliest_token_and_its_logprob_at_temperature_1,
    a_seed_decides_the_answer_and_siblings_differ,
    more_requests_than_slots_are_all_answered,
    a_stop_id_ends_the_answer_and_is_kept,
    a_stop_string_ends_the_answer_with_the_token_that_completes_it,
    an_answer_does_not_stop_before_min_tokens,
    top_k_1_is_greedy_and_cut_distributions_stay_inside_the_cut,
    a_continued_answer_equals_the_uninterrupted_one,
    an_answer_that_used_its_budget_gets_no_more_tokens,
    a_stream_hands_out_the_same_answer_in_pieces,
    closing_a_stream_drops_its_request,
    scores_are_the_logprobs_of_given_tokens_also_while_paused,
    scores_are_those_of_the_trainers_own_forward,
    requests_that_cannot_be_served_are_data_failures,
)
