from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import ConfigError, UserFunctionError
from penstock.ports import GenerateRequest
from penstock.produce import (
    AsyncProduceStrategyConfig,
    ProduceBatchStatus,
    ProduceContext,
    ProduceProgress,
    SyncProduceStrategyConfig,
    calculate_seq_staleness,
    calculate_stale_threshold,
)
from penstock.produce.strategy import ProduceStrategy
from penstock.replay import GroupState
from penstock.rollout import RolloutState, Status
from penstock.testing import EngineFaults, EngineScript, ScriptedTask, ScriptedWorld, run_virtual

NORMAL = ProduceBatchStatus.NORMAL
ABORT = ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
EXPIRED = ProduceBatchStatus.EXPIRED_BATCH

Seconds = Callable[..., EngineScript]
NewTask = Callable[..., ScriptedTask]
NewContext = Callable[..., ProduceContext]


def strategy_of(world: ScriptedWorld) -> ProduceStrategy:
    return world.manager.tasks["task"].strategy


def running(world: ScriptedWorld) -> int:
    return world.buffer.state_count("task", GroupState.RUNNING)


def drawn(world: ScriptedWorld) -> int:
    return world.buffer.conservation("task").drawn


async def pause(world: ScriptedWorld, ctx: ProduceContext) -> float:
    """As the manager does it: the signal, the engines, the drain."""
    ctx.update_event.set()
    ctx.changed.notify()
    await world.engine.pause_generation()
    spent = await strategy_of(world).pause_produce(ctx)
    await world.engine.continue_generation()
    ctx.update_event.clear()
    return spent


async def now() -> float:
    return asyncio.get_running_loop().time()


# What comes first.


def test_a_task_that_progress_does_not_know_is_an_error(asynchronous: NewTask, context: NewContext) -> None:
    async def main() -> None:
        world = ScriptedWorld([asynchronous()])
        ctx = context(world, progress=ProduceProgress.build(["task"]))
        ctx.progress.target_samples = {"other": 1}
        with pytest.raises(KeyError, match="task"):
            await strategy_of(world).produce_batch(ctx)

    run_virtual(main())


def test_nothing_due_is_normal_before_anything_else_is_asked(asynchronous: NewTask, context: NewContext) -> None:
    async def main() -> ProduceBatchStatus:
        world = ScriptedWorld([asynchronous()])
        return await strategy_of(world).produce_batch(context(world, due=0, train_step=99, aborted=True))

    assert run_virtual(main()) is NORMAL


def test_a_set_abort_signal_beats_an_old_model_and_nothing_is_sampled(
    asynchronous: NewTask, context: NewContext
) -> None:
    async def main() -> tuple[ProduceBatchStatus, int]:
        world = ScriptedWorld([asynchronous()])
        status = await strategy_of(world).produce_batch(context(world, due=4, train_step=99, aborted=True))
        return status, drawn(world)

    assert run_virtual(main()) == (ABORT, 0)


def test_a_model_too_old_is_said_before_leftovers_are_touched(asynchronous: NewTask, context: NewContext) -> None:
    async def main() -> tuple[ProduceBatchStatus, int]:
        world = ScriptedWorld([asynchronous(over_sample_threshold=1.0)])
        await strategy_of(world).produce_batch(context(world, due=2, size=2))
        await asyncio.sleep(1000)
        pending = strategy_of(world).pending_task_count()
        assert pending > 0
        status = await strategy_of(world).produce_batch(context(world, due=20, train_step=2))
        assert strategy_of(world).pending_task_count() == pending
        return status, drawn(world)

    assert run_virtual(main()) == (EXPIRED, 4)


@pytest.mark.parametrize(("max_staleness", "interval"), [(0, 1), (0, 3), (2, 1), (2, 3)])
def test_a_model_is_too_old_when_its_samples_would_expire(max_staleness: int, interval: int) -> None:
    strategy = AsyncProduceStrategyConfig(max_staleness=max_staleness, enable_partial_rollout=True).build(
        sync_weights_interval=interval
    )
    threshold = calculate_stale_threshold(max_staleness, interval)
    assert threshold == (max_staleness + 1) * interval
    assert not strategy.is_model_expired(5 + threshold, 5)
    assert strategy.is_model_expired(5 + threshold + 1, 5)


def test_staleness_is_counted_from_the_weights_just_before_the_step() -> None:
    assert [calculate_seq_staleness(m, 5) for m in (4, 3, 0)] == [0, 1, 4]
    assert calculate_seq_staleness(7, 5) == 0


def test_leftovers_are_claimed_before_anything_new_is_drawn(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> tuple[ProduceBatchStatus, int, float]:
        world = ScriptedWorld([asynchronous(over_sample_threshold=0.5)], engine=seconds(1, 1, 5, 5))
        await strategy_of(world).produce_batch(context(world, due=2, size=2))
        await asyncio.sleep(100)
        asked = await now()
        status = await strategy_of(world).produce_batch(context(world, due=3, size=2, train_step=1))
        return status, drawn(world), await now() - asked

    assert run_virtual(main()) == (NORMAL, 3, 0.0)


# How many.


@pytest.mark.parametrize(
    ("threshold", "size", "extra"), [(0.0, 4, 0), (0.1, 4, 1), (0.5, 4, 2), (0.5, 3, 2), (2.0, 4, 8)]
)
def test_the_over_sample_budget_is_a_fixed_share_of_the_batch_rounded_up(
    asynchronous: NewTask, context: NewContext, seconds: Seconds, threshold: float, size: int, extra: int
) -> None:
    async def main() -> list[int]:
        world = ScriptedWorld([asynchronous(over_sample_threshold=threshold)], engine=seconds(*range(1, 40)))
        counts = []
        for due in (size, size + 1):
            producing = asyncio.create_task(strategy_of(world).produce_batch(context(world, due=due, size=size)))
            await asyncio.sleep(0)
            counts.append(drawn(world))
            await producing
        return counts

    # The second call misses one group and still has the whole budget: not proportional to the gap.
    assert run_virtual(main()) == [size + extra, size + 1 + extra]


def test_production_ends_with_the_rest_still_pending(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> tuple[ProduceBatchStatus, float, int]:
        world = ScriptedWorld([asynchronous(over_sample_threshold=1.0)], engine=seconds(3, 50, 5, 50))
        status = await strategy_of(world).produce_batch(context(world, due=2, size=2))
        return status, await now(), strategy_of(world).pending_task_count()

    assert run_virtual(main()) == (NORMAL, 5.0, 2)


def test_what_is_filtered_or_failed_is_replaced_at_once(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    def not_the_first(samples: list[RolloutState]) -> bool:
        return samples[0].draw > 0

    async def main() -> tuple[float, int, int]:
        world = ScriptedWorld([asynchronous(is_valid_sample_fn=not_the_first)], engine=seconds(2, 9, 7))
        producing = asyncio.create_task(strategy_of(world).produce_batch(context(world, due=2, size=2)))
        await asyncio.sleep(3)
        in_flight = running(world)
        await producing
        return await now(), in_flight, drawn(world)

    assert run_virtual(main()) == (9.0, 2, 3)


def test_a_group_that_expires_while_a_long_rollout_runs_is_replaced_without_waiting_for_it(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> tuple[list[int], list[int]]:
        world = ScriptedWorld([asynchronous()], engine=seconds(1, 1000, 5))
        producing = asyncio.create_task(strategy_of(world).produce_batch(context(world, due=2, size=2)))
        await asyncio.sleep(10)
        before = [running(world), world.buffer.count("task", Status.COMPLETED)]
        world.buffer.refresh_staleness(2)
        await asyncio.sleep(0.1)
        after = [running(world), drawn(world)]
        producing.cancel()
        return before, after

    assert run_virtual(main()) == ([1, 1], [2, 3])


def test_the_wait_ends_when_another_path_claims_the_last_pending_group(
    asynchronous: NewTask, context: NewContext, seconds: Seconds
) -> None:
    async def main() -> float:
        world = ScriptedWorld([asynchronous(pause_timeout_s=1.0)], engine=seconds(50))
        ctx = context(world, due=1, size=1)
        producing = asyncio.create_task(strategy_of(world).produce_batch(ctx))
        await asyncio.sleep(5)
        # Cancelled and put back as ABORTED: nothing finished, and no count that the producer looks at has changed.
        await strategy_of(world).pause_produce(ctx)
        assert await producing is NORMAL
        return await now()

    assert run_virtual(main()) == 5.0 + 1.0 + 50.0


def test_should_continue_gets_counts_since_the_run_began(asynchronous: NewTask, context: NewContext) -> None:
    asked: list[tuple[int, int]] = []

    def note(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
        asked.append((completed_count, batch_size))
        return completed_count < batch_size

    async def main() -> None:
        world = ScriptedWorld([asynchronous(should_continue_fn=note)])
        world.manager.progress.consumed_samples["task"] = 7
        await strategy_of(world).produce_batch(context(world, due=9, size=2))

    run_virtual(main())
    assert asked[0] == (7, 9)
    assert asked[-1] == (9, 9)


def test_asking_for_more_than_is_due_ends_normally_with_a_warning(
    asynchronous: NewTask, context: NewContext, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> tuple[ProduceBatchStatus, int]:
        world = ScriptedWorld([asynchronous(should_continue_fn=lambda completed_count, batch_size, **kwargs: True)])
        return await strategy_of(world).produce_batch(context(world, due=2, size=2)), drawn(world)

    assert run_virtual(main()) == (NORMAL, 2)
    assert "asks for more than the 2 groups that are due" in caplog.text


def broken(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
    raise ZeroDivisionError("in the user's code")


def test_an_error_in_should_continue_names_the_function(asynchronous: NewTask, context: NewContext) -> None:
    async def main() -> None:
        world = ScriptedWorld([asynchronous(should_continue_fn=broken)])
        await strategy_of(world).produce_batch(context(world, due=2, size=2))

    with pytest.raises(UserFunctionError, match=r"should_continue_fn .*\.broken raised ZeroDivisionError"):
        run_virtual(main())


# Expired groups and tail batches.


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


# Interruptions.


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


async def interrupt(world: ScriptedWorld, context: NewContext, *, due: int = 1) -> None:
    ctx = context(world, due=due, size=due)
    producing = asyncio.create_task(strategy_of(world).produce_batch(ctx))
    await asyncio.sleep(3)
    await pause(world, ctx)
    await producing


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


# Configuration.


@pytest.mark.parametrize(
    "options",
    [
        {"tail_batch_max_tries": 2},
        {"tail_batch_max_tries": 2, "tail_batch_trigger_size": 0},
        {"tail_batch_max_tries": 2, "tail_batch_trigger_size": 2, "enable_partial_rollout": True},
    ],
)
def test_a_cap_of_tries_without_a_tail_batch_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tail_batch_max_tries"):
        AsyncProduceStrategyConfig(**options).check()


@pytest.mark.parametrize(
    "options",
    [
        {"max_staleness": -1},
        {"max_token_staleness": -1},
        {"over_sample_threshold": -0.1},
        {"tail_batch_trigger_size": -2},
        {"tail_batch_max_tries": 0},
    ],
)
def test_negative_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        AsyncProduceStrategyConfig(**options)


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_below_one_is_refused(interval: int) -> None:
    with pytest.raises(ValueError, match="sync_weights_interval"):
        AsyncProduceStrategyConfig().build(sync_weights_interval=interval)


def test_staleness_without_partial_rollout_and_without_a_cap_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    AsyncProduceStrategyConfig(max_staleness=1).build()
    assert "enable_partial_rollout" in caplog.text
    assert "tail_batch_max_tries" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        AsyncProduceStrategyConfig(max_staleness=1, enable_partial_rollout=True).build()
        AsyncProduceStrategyConfig(max_staleness=1, tail_batch_trigger_size=1, tail_batch_max_tries=1).build()
        AsyncProduceStrategyConfig().build()
    assert not caplog.text


def test_the_synchronous_strategy_has_the_staleness_of_one_sync_period() -> None:
    assert SyncProduceStrategyConfig().stale_rule(3).stale_threshold == 3
