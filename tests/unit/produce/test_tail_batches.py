"""Groups that expired or were interrupted too often: discarded, rolled again, or played in a tail batch."""

from __future__ import annotations

import asyncio

from penstock.ports import GenerateRequest
from penstock.rollout import Status
from penstock.testing import EngineScript, ScriptedWorld, run_virtual

from .strategy_parts import NewContext, NewTask, Seconds, drawn, interrupt, pause, running, strategy_of


async def expire(world: ScriptedWorld, context: NewContext, n: int) -> None:
    """Have n completed groups and let them expire."""
    await strategy_of(world).produce_batch(context(world, due=n, size=n))
    assert world.buffer.refresh_staleness(2) == {"task": n}
    world.manager.progress.begin_consume(2)


async def replayed(world: ScriptedWorld, context: NewContext, due: int) -> tuple[list[str], int]:
    """Start producing for step 2; the groups that run at once, and how many were ever drawn."""
    await world.load_weights(1)
    ctx = context(world, due=due, size=due, train_step=2, model_step=1)
    before = len(world.history.events)
    producing = asyncio.create_task(strategy_of(world).produce_batch(ctx))
    await asyncio.sleep(0)
    started = [event.transition.group_id for event in world.history.events[before:]]
    await producing
    return started, drawn(world)


def test_trigger_minus_one_discards_expired_groups(asynchronous: NewTask, context: NewContext) -> None:
    async def main() -> tuple[list[str], int]:
        world = ScriptedWorld([asynchronous(tail_batch_trigger_size=-1)])
        await expire(world, context, 2)
        assert world.buffer.discarded("task") == {"expired": 2}
        return await replayed(world, context, 2)

    assert run_virtual(main()) == (["task:2", "task:3"], 4)


def test_trigger_zero_rolls_expired_groups_again_as_soon_as_there_is_one(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> tuple[list[str], int]:
        task = asynchronous(tail_batch_trigger_size=0, over_sample_threshold=0.5)
        world = ScriptedWorld([task], engine=seconds(1, 50))
        await expire(world, context, 1)
        return await replayed(world, context, 2)

    started, total = run_virtual(main())
    # One expired group, the over-sampled one that was left running, one more for the batch and one for the budget.
    assert "task:0" in started
    assert total == 3


def test_below_the_trigger_expired_groups_wait(asynchronous: NewTask, context: NewContext) -> None:
    async def main() -> tuple[list[str], int]:
        world = ScriptedWorld([asynchronous(tail_batch_trigger_size=3)])
        await expire(world, context, 2)
        found = await replayed(world, context, 2)
        assert world.buffer.count("task", Status.EXPIRED) == 2
        return found

    assert run_virtual(main()) == (["task:2", "task:3"], 4)


def test_at_the_trigger_one_tail_batch_plays_them_without_over_sampling(
    asynchronous: NewTask, context: NewContext
) -> None:
    async def main() -> tuple[list[str], int, int]:
        world = ScriptedWorld([asynchronous(tail_batch_trigger_size=2, prompt_repeat_k=1)])
        await expire(world, context, 2)
        started, total = await replayed(world, context, 2)
        return started, total, strategy_of(world).pending_task_count()

    assert run_virtual(main()) == (["task:0", "task:1"], 2, 0)


def test_a_tail_batch_has_no_over_sample_budget(asynchronous: NewTask, context: NewContext) -> None:
    async def main() -> int:
        world = ScriptedWorld([asynchronous(tail_batch_trigger_size=2, over_sample_threshold=1.0)])
        ctx = context(world, due=2, size=2)
        await strategy_of(world).produce_batch(ctx)
        await pause(world, ctx)
        world.buffer.refresh_staleness(2)
        world.manager.progress.begin_consume(2)
        await world.load_weights(1)
        assert world.buffer.count("task", Status.EXPIRED) >= 2
        before = drawn(world)
        producing = asyncio.create_task(
            strategy_of(world).produce_batch(context(world, due=3, size=3, train_step=2, model_step=1))
        )
        await asyncio.sleep(0)
        in_flight = running(world)
        await producing
        assert drawn(world) == before
        return in_flight

    assert run_virtual(main()) == 3


def test_a_re_roll_makes_only_the_expired_rollouts_again_and_judges_no_sibling_twice(
    asynchronous: NewTask, context: NewContext
) -> None:
    def siblings(request: GenerateRequest) -> list[int]:
        return [97] * (2 if request.request_id.endswith(":0") else 10)

    async def main() -> None:
        task = asynchronous(tail_batch_trigger_size=0, max_staleness=1)
        world = ScriptedWorld([task], engine=EngineScript(tokens_per_s=1.0, answers=siblings))
        # The first sibling is made by weights 0, the second one, interrupted, by weights 1.
        await interrupt(world, context)
        await world.load_weights(1)
        await strategy_of(world).produce_batch(context(world, due=1, size=1, train_step=2, model_step=1))
        assert world.buffer.refresh_staleness(3) == {"task": 1}
        world.manager.progress.begin_consume(3)
        await world.load_weights(2)
        window = world.manager.progress.windows["task"]
        counted = window.produced_rollouts, window.raw_reward_count, window.produced_tokens
        await strategy_of(world).produce_batch(context(world, due=1, size=1, train_step=3, model_step=2))
        stale, fresh = world.buffer.take_batch({"task": 1}, train_step=3)["task"][0]
        assert (stale.response.steps, fresh.response.steps) == (((2, 2),), ((1, 10),))
        assert world.judgers["task"].judged == {stale.rollout_id: 2, fresh.rollout_id: 1}
        now_counted = window.produced_rollouts, window.raw_reward_count, window.produced_tokens
        assert [after - before for before, after in zip(counted, now_counted, strict=True)] == [1, 1, 2]
        assert world.buffer.tokens.wasted["re_rolled"] == 2
        assert drawn(world) == 1
        world.check()

    run_virtual(main())


def test_at_the_cap_of_tries_a_group_waits_for_a_tail_batch(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> tuple[list[int], list[str]]:
        task = asynchronous(tail_batch_trigger_size=2, tail_batch_max_tries=2, prompt_repeat_k=1)
        world = ScriptedWorld([task], engine=seconds(10, 10, default=1))
        waiting = []
        for _ in range(2):
            await interrupt(world, context, due=2)
            waiting.append(world.buffer.count("task", Status.MAX_TRIES))
        ctx = context(world, due=2, size=2)
        producing = asyncio.create_task(strategy_of(world).produce_batch(ctx))
        await asyncio.sleep(1)
        playing = sorted(attempt.group[0].group_id for attempt in strategy_of(world).attempts())
        assert all(attempt.protected for attempt in strategy_of(world).attempts())
        await producing
        return waiting, playing

    assert run_virtual(main()) == ([0, 2], ["task:0", "task:1"])


def test_below_the_trigger_a_group_at_its_cap_is_left_alone(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> list[int]:
        task = asynchronous(tail_batch_trigger_size=2, tail_batch_max_tries=1, prompt_repeat_k=1)
        world = ScriptedWorld([task], engine=seconds(10, default=1))
        await interrupt(world, context)
        await strategy_of(world).produce_batch(context(world, due=1, size=1))
        return [world.buffer.count("task", Status.MAX_TRIES), drawn(world)]

    assert run_virtual(main()) == [1, 2]
