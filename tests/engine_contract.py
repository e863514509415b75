"""What every engine must do, as plain async functions over a `Subject`: the engine to make and what it may be asked.

A test module for one engine builds a `Subject` and runs every function of `CONTRACT`:

    @pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
    def test_the_contract(check, subject):
        asyncio.run(check(subject))
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.errors import DataFailure, InfrastructureFailure, RunError, WeightSyncError
from penstock.ports import Completion, Engine, EngineStats, GenerateRequest, OnPause
from penstock.rollout import FinishReason, SampleParams, pack_ids, unpack_ids

DEADLINE = 150.0
"""For one check; a busy machine may leave a process without a core for most of a minute."""


@dataclass(frozen=True)
class Tensors:
    """A `WeightSource` over a state dict."""

    state: Mapping[str, Any]

    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield from self.state.items()


class CharacterTokenizer:
    """Token i is the i-th printable character; no template, and by default no end-of-text."""

    def __init__(self, vocab_size: int = 96, stop_ids: frozenset[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids

    def encode(self, text: str) -> list[int]:
        return [ord(character) - 32 for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(int(token) + 32) for token in ids)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


@dataclass(frozen=True)
class Subject:
    make: Callable[[], Engine]
    """A fresh engine with `CharacterTokenizer`'s 96 tokens, no end-of-text, a context of at least 2048,
    at least 4 and at most 8 requests running at once."""
    other_weights: Tensors
    """Weights under which greedy answers differ."""
    reference: Callable[[Sequence[int], float], np.ndarray]
    """The trainer's view: log_softmax(logits / temperature) after each token, (length x vocabulary)."""
    numbered_randomness: bool = True
    """The i-th token uses the i-th random number of its seed: a continued sample equals the uninterrupted one."""


class AsNew:
    """A running engine that looks new to each check, where starting one takes seconds."""

    def __init__(self, engine: Engine, weights: Tensors) -> None:
        self._engine = engine
        self._weights = weights
        self._made_before: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def again(self) -> AsNew:
        """What `Subject.make` returns. Closing it brings the engine back to step 0 and leaves it running."""
        self._made_before = None
        return self

    async def generate(self, request: Any) -> Any:
        await self.stats()
        return await self._engine.generate(request)

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        await self.stats()
        async with contextlib.aclosing(self._engine.stream(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def stats(self) -> EngineStats:
        stats = await self._engine.stats()
        if self._made_before is None:
            self._made_before = stats.generated_tokens
        return msgspec.structs.replace(stats, generated_tokens=stats.generated_tokens - self._made_before)

    async def close(self) -> None:
        await self._engine.pause_generation()
        if await self._engine.model_step() != 0:
            await self._engine.load_weights(self._weights, 0)
        await self._engine.continue_generation()


PROMPTS = ([5, 17, 40, 8], [33], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [60] * 37, [7, 8])
LONG = 1500
"""An answer so long that a test always finds it unfinished."""


def ask(
    name: str,
    prompt: Sequence[int] = PROMPTS[0],
    *,
    seed: int = 0,
    given: Sequence[int] = (),
    on_pause: OnPause = "abort",
    **params: Any,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=pack_ids(prompt),
        response_ids=pack_ids(given),
        params=SampleParams(**{"max_tokens": 12, **params}),
        seed=seed,
        first_uniform=len(given),
        on_pause=on_pause,
    )


@contextlib.asynccontextmanager
async def running(subject: Subject) -> AsyncIterator[Engine]:
    async with asyncio.timeout(DEADLINE):
        engine = subject.make()
        try:
            yield engine
        finally:
            await engine.close()


async def has_made(engine: Engine, tokens: int) -> None:
    """Waits until the engine has made so many tokens since it started."""
    while (await engine.stats()).generated_tokens < tokens:  # noqa: ASYNC110 - an engine has no event for this
        await asyncio.sleep(0.001)


async def has_requests(engine: Engine, count: int) -> None:
    """Waits until the engine knows of so many."""
    while (stats := await engine.stats()).running + stats.waiting < count:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def has_none(engine: Engine) -> None:
    """Waits until the engine knows of no request."""
    while (stats := await engine.stats()).running + stats.waiting:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def ids_of(completion: Completion) -> list[int]:
    return unpack_ids(completion.ids).tolist()


def logprobs_of(completion: Completion) -> np.ndarray:
    return np.frombuffer(completion.logprobs, dtype=np.float32)


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


async def pause_abort_hands_back_partial_tokens_and_refuses_new_requests(subject: Subject) -> None:
    async with running(subject) as engine:
        tasks = [asyncio.create_task(engine.generate(ask(f"{i}", seed=i, max_tokens=LONG))) for i in range(20)]
        await has_made(engine, 20)
        await engine.pause_generation()
        completions = await asyncio.gather(*tasks)
        assert {completion.finish_reason for completion in completions} == {FinishReason.ABORT}
        made = sum(len(ids_of(completion)) for completion in completions)
        assert made == (await engine.stats()).generated_tokens
        assert any(completion.ids == b"" for completion in completions), "some were still waiting"
        await engine.pause_generation()
        refused = await engine.generate(ask("new"))
        assert (refused.ids, refused.finish_reason) == (b"", FinishReason.ABORT)
        await engine.continue_generation()
        await engine.continue_generation()
        assert (await engine.generate(ask("later"))).finish_reason is FinishReason.LENGTH


async def a_partial_answer_goes_on_after_an_abort_as_if_nothing_happened(subject: Subject) -> None:
    async with running(subject) as engine:
        task = asyncio.create_task(engine.generate(ask("first", temperature=0.0, max_tokens=LONG)))
        await has_made(engine, 5)
        await engine.pause_generation()
        partial = ids_of(await task)
        await engine.continue_generation()
        budget = len(partial) + 10
        rest = await engine.generate(ask("rest", temperature=0.0, given=partial, max_tokens=budget))
        whole = await engine.generate(ask("whole", temperature=0.0, max_tokens=budget))
        assert partial + ids_of(rest) == ids_of(whole)


async def a_kept_answer_is_frozen_by_a_pause_and_goes_on_the_same(subject: Subject) -> None:
    async with running(subject) as engine:
        # Greedy: with other neighbours an engine may round differently, and a uniform may fall beside a boundary.
        expected = await engine.generate(ask("alone", temperature=0.0, max_tokens=150))
        before = (await engine.stats()).generated_tokens
        task = asyncio.create_task(engine.generate(ask("frozen", temperature=0.0, max_tokens=150, on_pause="keep")))
        await has_made(engine, before + 3)
        await engine.pause_generation()
        frozen = (await engine.stats()).generated_tokens
        late = asyncio.create_task(engine.generate(ask("late", temperature=0.0, max_tokens=4, on_pause="keep")))
        await asyncio.sleep(0)
        await engine.check_health()
        assert (await engine.stats()).generated_tokens == frozen
        assert not late.done()
        await engine.continue_generation()
        assert ids_of(await task) == ids_of(expected)
        assert ids_of(await late) == ids_of(expected)[:4]


async def a_served_request_goes_on_while_others_are_aborted_and_frozen(subject: Subject) -> None:
    async with running(subject) as engine:
        expected = ids_of(await engine.generate(ask("alone", temperature=0.0, max_tokens=150)))
        before = (await engine.stats()).generated_tokens
        aborted = asyncio.create_task(engine.generate(ask("aborted", max_tokens=LONG)))
        served = asyncio.create_task(engine.generate(ask("served", temperature=0.0, max_tokens=150, on_pause="serve")))
        await has_made(engine, before + 6)
        await engine.pause_generation()
        assert (await aborted).finish_reason is FinishReason.ABORT
        new = await engine.generate(ask("new", temperature=0.0, max_tokens=9, on_pause="serve"))
        assert (ids_of(new), new.finish_reason) == (expected[:9], FinishReason.LENGTH)
        assert ids_of(await served) == expected
        assert (await engine.generate(ask("refused"))).finish_reason is FinishReason.ABORT
        await engine.continue_generation()


async def served_requests_find_room_though_frozen_ones_fill_the_engine(subject: Subject) -> None:
    async with running(subject) as engine:
        asked = [ask(f"{i}", seed=i, max_tokens=60, on_pause="keep") for i in range(20)]
        kept = [asyncio.create_task(engine.generate(request)) for request in asked]
        await has_made(engine, 20)
        await engine.pause_generation()
        completion = await engine.generate(ask("judge", max_tokens=7, on_pause="serve"))
        assert completion.finish_reason is FinishReason.LENGTH
        await engine.continue_generation()
        for answer in await asyncio.gather(*kept):
            assert (len(ids_of(answer)), answer.finish_reason) == (60, FinishReason.LENGTH)


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


async def a_paused_stream_ends_or_goes_on_as_its_request_says(subject: Subject) -> None:
    async with running(subject) as engine:

        async def collect(request: GenerateRequest) -> list[Completion]:
            return [piece async for piece in engine.stream(request)]

        aborted = asyncio.create_task(collect(ask("aborted", max_tokens=LONG)))
        kept = asyncio.create_task(collect(ask("kept", seed=1, max_tokens=100, on_pause="keep")))
        await has_made(engine, 10)
        await engine.pause_generation()
        assert (await aborted)[-1].finish_reason is FinishReason.ABORT
        assert (await collect(ask("refused")))[-1] == (await engine.generate(ask("refused")))
        assert not kept.done()
        await engine.load_weights(subject.other_weights, 4)
        await engine.continue_generation()
        pieces = await kept
        assert sum(len(ids_of(piece)) for piece in pieces) == 100
        assert pieces[0].steps[0][0] == 0 and pieces[-1].steps[-1][0] == 4


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


async def weights_can_be_loaded_while_a_request_is_served(subject: Subject) -> None:
    async with running(subject) as engine:
        served = asyncio.create_task(engine.generate(ask("served", max_tokens=LONG, on_pause="serve")))
        await has_made(engine, 3)
        await engine.pause_generation()
        await engine.load_weights(subject.other_weights, 6)
        made = (await engine.stats()).generated_tokens
        await has_made(engine, made + 3)
        await engine.continue_generation()
        await engine.abort(["served"])
        steps = (await served).steps
        assert [step for step, _ in steps] == [0, 6]


async def abort_ends_the_named_requests_only(subject: Subject) -> None:
    async with running(subject) as engine:
        doomed = asyncio.create_task(engine.generate(ask("doomed", max_tokens=LONG)))
        spared = asyncio.create_task(engine.generate(ask("spared", seed=1, max_tokens=60)))
        await has_made(engine, 2)
        await engine.abort(["doomed", "unknown"])
        completion = await doomed
        assert completion.finish_reason is FinishReason.ABORT
        assert 0 < len(ids_of(completion)) < LONG
        assert (await spared).finish_reason is FinishReason.LENGTH


async def abort_reaches_frozen_requests_and_those_that_wait_for_the_pause_to_end(subject: Subject) -> None:
    async with running(subject) as engine:
        frozen = asyncio.create_task(engine.generate(ask("frozen", max_tokens=LONG, on_pause="keep")))
        await has_made(engine, 2)
        await engine.pause_generation()
        late = asyncio.create_task(engine.generate(ask("late", on_pause="keep")))
        await has_requests(engine, 2)
        await engine.abort(["frozen", "late"])
        completions = await asyncio.gather(frozen, late)
        assert {completion.finish_reason for completion in completions} == {FinishReason.ABORT}
        assert len(ids_of(completions[0])) >= 2 and completions[1].ids == b""
        await engine.continue_generation()


async def cancelling_a_request_frees_its_place(subject: Subject) -> None:
    async with running(subject) as engine:
        tasks = [asyncio.create_task(engine.generate(ask(f"{i}", max_tokens=LONG))) for i in range(12)]
        await has_made(engine, 5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        await engine.check_health()
        # In another process the word may arrive a moment later.
        await has_none(engine)
        assert (await engine.generate(ask("next"))).finish_reason is FinishReason.LENGTH


async def loaded_weights_make_the_next_answers_and_are_named_by_them(subject: Subject) -> None:
    async with running(subject) as engine:
        old = ids_of(await engine.generate(ask("old", temperature=0.0, max_tokens=20)))
        await engine.load_weights(subject.other_weights, 7)
        assert await engine.model_step() == 7
        new = await engine.generate(ask("new", temperature=0.0, max_tokens=20))
        assert ids_of(new) != old
        assert new.steps == ((7, 20),)


async def a_frozen_answer_goes_on_under_the_new_weights_and_says_so(subject: Subject) -> None:
    async with running(subject) as engine:
        task = asyncio.create_task(engine.generate(ask("a", max_tokens=LONG, on_pause="keep")))
        await has_made(engine, 3)
        await engine.pause_generation()
        made = (await engine.stats()).generated_tokens
        await engine.load_weights(subject.other_weights, 2)
        await engine.continue_generation()
        await has_made(engine, made + 1)
        await engine.abort(["a"])
        completion = await task
        assert completion.steps == ((0, made), (2, len(ids_of(completion)) - made))


async def wrong_weights_are_refused_and_the_old_ones_kept(subject: Subject) -> None:
    state = dict(subject.other_weights.state)
    name = next(iter(state))
    wrong: list[dict[str, Any]] = [
        {key: value for key, value in state.items() if key != name},
        {**state, "no.such.weight": state[name]},
        {**state, name: state[name][:-1]},
    ]
    async with running(subject) as engine:
        old = ids_of(await engine.generate(ask("old", temperature=0.0)))
        for weights in wrong:
            with pytest.raises(WeightSyncError, match="kept"):
                await engine.load_weights(Tensors(weights), 3)
        assert await engine.model_step() == 0
        assert ids_of(await engine.generate(ask("still", temperature=0.0))) == old


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


async def a_sleeping_engine_wakes_with_the_same_answers(subject: Subject) -> None:
    async with running(subject) as engine:
        before = ids_of(await engine.generate(ask("before", seed=4)))
        await engine.pause_generation()
        await engine.sleep()
        await engine.wake()
        await engine.continue_generation()
        assert ids_of(await engine.generate(ask("after", seed=4))) == before


async def an_engine_sleeps_only_when_paused(subject: Subject) -> None:
    async with running(subject) as engine:
        with pytest.raises(RunError, match="cannot sleep"):
            await engine.sleep()
        assert (await engine.generate(ask("a"))).finish_reason is FinishReason.LENGTH


async def kept_and_served_requests_finish_under_their_weights_before_an_engine_sleeps(subject: Subject) -> None:
    async with running(subject) as engine:
        asked = [ask(f"{i}", seed=i, max_tokens=80, on_pause="keep") for i in range(10)]
        asked += [ask("served", seed=99, max_tokens=80, on_pause="serve")]
        tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
        await has_made(engine, 20)
        await engine.pause_generation()
        await engine.sleep()
        made = (await engine.stats()).generated_tokens
        late = asyncio.create_task(engine.generate(ask("late", on_pause="serve")))
        await engine.check_health()
        await engine.load_weights(subject.other_weights, 1)
        assert {completion.steps for completion in await asyncio.gather(*tasks)} == {((0, 80),)}
        assert not late.done() and made == (await engine.stats()).generated_tokens
        await engine.wake()
        assert (await late).steps == ((1, 12),)
        await engine.continue_generation()


async def closing_fails_what_is_pending_and_all_that_comes_later(subject: Subject) -> None:
    async with running(subject) as engine:
        tasks = [asyncio.create_task(engine.generate(ask(f"{i}", max_tokens=LONG))) for i in range(12)]
        await has_made(engine, 1)
        await engine.close()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, InfrastructureFailure)
        await engine.close()
        with pytest.raises(InfrastructureFailure):
            await engine.generate(ask("late"))
        with pytest.raises(InfrastructureFailure):
            await engine.check_health()


CONTRACT: tuple[Callable[[Subject], Awaitable[None]], ...] = (
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
    pause_abort_hands_back_partial_tokens_and_refuses_new_requests,
    a_partial_answer_goes_on_after_an_abort_as_if_nothing_happened,
    a_kept_answer_is_frozen_by_a_pause_and_goes_on_the_same,
    a_served_request_goes_on_while_others_are_aborted_and_frozen,
    served_requests_find_room_though_frozen_ones_fill_the_engine,
    weights_can_be_loaded_while_a_request_is_served,
    a_stream_hands_out_the_same_answer_in_pieces,
    a_paused_stream_ends_or_goes_on_as_its_request_says,
    closing_a_stream_drops_its_request,
    scores_are_the_logprobs_of_given_tokens_also_while_paused,
    scores_are_those_of_the_trainers_own_forward,
    abort_ends_the_named_requests_only,
    abort_reaches_frozen_requests_and_those_that_wait_for_the_pause_to_end,
    cancelling_a_request_frees_its_place,
    loaded_weights_make_the_next_answers_and_are_named_by_them,
    a_frozen_answer_goes_on_under_the_new_weights_and_says_so,
    wrong_weights_are_refused_and_the_old_ones_kept,
    requests_that_cannot_be_served_are_data_failures,
    a_sleeping_engine_wakes_with_the_same_answers,
    an_engine_sleeps_only_when_paused,
    kept_and_served_requests_finish_under_their_weights_before_an_engine_sleeps,
    closing_fails_what_is_pending_and_all_that_comes_later,
)

ABOUT_THE_MODEL = (
    logprobs_are_those_of_the_trainers_own_forward,
    scores_are_those_of_the_trainers_own_forward,
    greedy_answers_take_the_likeliest_token_and_its_logprob_at_temperature_1,
    a_stop_string_ends_the_answer_with_the_token_that_completes_it,
    an_answer_does_not_stop_before_min_tokens,
    top_k_1_is_greedy_and_cut_distributions_stay_inside_the_cut,
    loaded_weights_make_the_next_answers_and_are_named_by_them,
    wrong_weights_are_refused_and_the_old_ones_kept,
    requests_that_cannot_be_served_are_data_failures,
)
"""What an engine without a model, a tokenizer and weights cannot be asked."""
