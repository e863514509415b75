"""What every engine does when it is paused, aborted, given new weights, put to sleep or closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_subject import LONG, Check, Subject, Tensors, ask, has_made, has_none, has_requests, ids_of, running

from penstock.errors import InfrastructureFailure, RunError, WeightSyncError
from penstock.ports import Completion, GenerateRequest
from penstock.rollout import FinishReason


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


CHANGES: tuple[Check, ...] = (
    pause_abort_hands_back_partial_tokens_and_refuses_new_requests,
    a_partial_answer_goes_on_after_an_abort_as_if_nothing_happened,
    a_kept_answer_is_frozen_by_a_pause_and_goes_on_the_same,
    a_served_request_goes_on_while_others_are_aborted_and_frozen,
    served_requests_find_room_though_frozen_ones_fill_the_engine,
    weights_can_be_loaded_while_a_request_is_served,
    a_paused_stream_ends_or_goes_on_as_its_request_says,
    abort_ends_the_named_requests_only,
    abort_reaches_frozen_requests_and_those_that_wait_for_the_pause_to_end,
    cancelling_a_request_frees_its_place,
    loaded_weights_make_the_next_answers_and_are_named_by_them,
    a_frozen_answer_goes_on_under_the_new_weights_and_says_so,
    wrong_weights_are_refused_and_the_old_ones_kept,
    a_sleeping_engine_wakes_with_the_same_answers,
    an_engine_sleeps_only_when_paused,
    kept_and_served_requests_finish_under_their_weights_before_an_engine_sleeps,
    closing_fails_what_is_pending_and_all_that_comes_later,
)
