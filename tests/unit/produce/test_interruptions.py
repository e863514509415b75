"""Answers that a pause interrupts: started again, continued under the new weights, or cancelled."""

from __future__ import annotations

import asyncio

import pytest

from penstock.rollout import Status
from penstock.testing import EngineFaults, ScriptedWorld, run_virtual

from .strategy_parts import ABORT, NewContext, NewTask, Seconds, interrupt, now, pause, strategy_of


def test_without_partial_rollout_an_interrupted_answer_starts_again_and_counts_a_try(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> tuple[list[Status], list[int], list[int]]:
        world = ScriptedWorld([asynchronous()], engine=seconds(10))
        ctx = context(world, due=1, size=1)
        producing = asyncio.create_task(strategy_of(world).produce_batch(ctx))
        await asyncio.sleep(4.5)
        await pause(world, ctx)
        await asyncio.gather(producing, return_exceptions=True)
        group = world.buffer.get(1, "task", Status.ABORTED)[0]
        assert world.buffer.tokens.wasted == {"aborted": 8}
        world.check()
        return [r.status for r in group], [r.num_tries for r in group], [len(r.response) for r in group]

    assert run_virtual(main()) == ([Status.ABORTED] * 2, [1, 1], [0, 0])


def test_with_partial_rollout_it_continues_under_the_new_weights_and_old_tokens_keep_version_and_logprobs(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> None:
        task = asynchronous(enable_partial_rollout=True, max_staleness=1, prompt_repeat_k=1)
        world = ScriptedWorld([task], engine=seconds(10))
        ctx = context(world, due=1, size=1)
        producing = asyncio.create_task(strategy_of(world).produce_batch(ctx))
        await asyncio.sleep(4.5)
        await pause(world, ctx)
        assert await producing is ABORT
        await world.load_weights(1)
        started = await now()
        await strategy_of(world).produce_batch(context(world, due=1, size=1, train_step=2, model_step=1))
        assert await now() - started == pytest.approx(6.0)
        (rollout,) = world.buffer.take_batch({"task": 1}, train_step=2)["task"][0]
        assert rollout.response.steps == ((0, 4), (1, 6))
        assert len(rollout.logprobs) == 10
        assert rollout.num_tries == 0
        assert not world.buffer.tokens.wasted

    run_virtual(main())


def test_an_answer_that_finishes_during_the_pause_is_kept(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> tuple[int, int]:
        world = ScriptedWorld([asynchronous(prompt_repeat_k=1)], engine=seconds(10, 50, pause_s=6.0))
        ctx = context(world, due=2, size=2)
        producing = asyncio.create_task(strategy_of(world).produce_batch(ctx))
        await asyncio.sleep(5)
        await pause(world, ctx)
        await producing
        return world.buffer.count("task", Status.COMPLETED), world.buffer.count("task", Status.ABORTED)

    assert run_virtual(main()) == (1, 1)


def test_nothing_pending_pauses_in_no_time(asynchronous: NewTask, context: NewContext) -> None:
    async def main() -> float:
        world = ScriptedWorld([asynchronous()])
        return await strategy_of(world).pause_produce(context(world, aborted=True))

    assert run_virtual(main()) == 0.0


def test_after_the_pause_timeout_the_rest_is_cancelled_and_put_back_with_its_prompt(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> None:
        task = asynchronous(pause_timeout_s=30.0)
        world = ScriptedWorld([task], engine=seconds(5, default=9, faults=EngineFaults(hangs=1.0)))
        ctx = context(world, due=2, size=2)
        producing = asyncio.create_task(strategy_of(world).produce_batch(ctx))
        await asyncio.sleep(3)
        assert await pause(world, ctx) == pytest.approx(30.0)
        await producing
        assert strategy_of(world).pending_task_count() == 0
        groups = world.buffer.get(9, "task", Status.ABORTED)
        assert [group[0].group_id for group in groups] == ["task:0", "task:1"]
        assert all(rollout.prompt.ids for group in groups for rollout in group)
        world.check()

    run_virtual(main())


def test_tokens_older_than_their_own_bound_do_not_expire_a_rollout_that_has_newer_ones(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> list[int]:
        task = asynchronous(enable_partial_rollout=True, max_staleness=1, max_token_staleness=0, prompt_repeat_k=1)
        world = ScriptedWorld([task], engine=seconds(10, default=1))
        await interrupt(world, context)
        await world.load_weights(2)
        world.manager.progress.begin_consume(3)
        await strategy_of(world).produce_batch(context(world, due=1, size=1, train_step=3, model_step=2))
        counts = [world.buffer.count("task", Status.COMPLETED)]
        world.buffer.refresh_staleness(4)
        return [*counts, world.buffer.count("task", Status.COMPLETED)]

    assert run_virtual(main()) == [1, 0]
