"""What the asynchronous strategy does first, how many groups it plays, and which options it takes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from penstock.errors import ConfigError, UserFunctionError
from penstock.produce import (
    AsyncProduceStrategyConfig,
    ProduceBatchStatus,
    ProduceProgress,
    SyncProduceStrategyConfig,
    calculate_seq_staleness,
    calculate_stale_threshold,
)
from penstock.rollout import RolloutState, Status
from penstock.testing import ScriptedWorld, run_virtual

from .strategy_parts import ABORT, EXPIRED, NORMAL, NewContext, NewTask, Seconds, drawn, now, running, strategy_of

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
