"""Who is timed, and who waits without a clock: the controller over scripted engines, on the virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from engine_fakes import Live

from penstock.engine import RolloutControllerConfig
from penstock.engine.controller import RolloutController
from penstock.errors import InfrastructureFailure
from penstock.ports import GenerateRequest, OnPause
from penstock.rollout import FailureReason, FinishReason, SampleParams, pack_ids
from penstock.testing import EngineFaults, EngineScript, ScriptedEngine, constant, run_virtual

SLOTS = 4


def fifty_seconds(**script: Any) -> ScriptedEngine:
    """Every answer takes 50 s."""
    return ScriptedEngine(EngineScript(slots=SLOTS, tokens_per_s=2.0, length=constant(100), **script))


def build(engine: ScriptedEngine, **limits: Any) -> RolloutController:
    return RolloutControllerConfig(**limits).build({"only": engine}, max_running=SLOTS)


def request(name: str, on_pause: OnPause = "abort") -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=pack_ids([1]),
        params=SampleParams(max_tokens=1000),
        seed=1,
        group_id=name.split("/")[0],
        on_pause=on_pause,
    )


def test_work_for_hours_on_a_healthy_engine_fails_nobody() -> None:
    async def main() -> None:
        controller = build(fifty_seconds(), request_timeout_s=60.0)
        asked = [request(f"{group}/{i}") for group in range(200) for i in range(4)]
        answers = await asyncio.gather(*map(controller.generate, asked))
        assert {answer.finish_reason for answer in answers} == {FinishReason.STOP}
        assert asyncio.get_running_loop().time() == pytest.approx(200 * 50.0, rel=0.01)
        await controller.close()

    run_virtual(main(), deadline=1e6)


def test_an_engine_that_takes_too_long_is_late_from_the_moment_it_was_given_the_request() -> None:
    async def main() -> None:
        controller = build(fifty_seconds(faults=EngineFaults(hangs=1.0)), request_timeout_s=60.0, failures_to_fence=99)
        first = [asyncio.create_task(controller.generate(request(f"{i}"))) for i in range(SLOTS)]
        await asyncio.sleep(30)
        late = asyncio.create_task(controller.generate(request("late")))
        for outcome in await asyncio.gather(*first, return_exceptions=True):
            assert isinstance(outcome, InfrastructureFailure)
            assert outcome.reason is FailureReason.ENGINE_DEADLINE
        with pytest.raises(InfrastructureFailure, match="did not answer late within 60 s"):
            await late
        # Fifteen tries, at most four at a time, for a whole minute each.
        assert 4 * 60 <= asyncio.get_running_loop().time() <= 5 * 60
        await controller.close()

    run_virtual(main(), deadline=1e6)


def test_a_frozen_request_is_not_timed_and_its_place_is_free_for_what_is_served() -> None:
    async def main() -> None:
        controller = build(fifty_seconds(), request_timeout_s=60.0)
        kept = [asyncio.create_task(controller.generate(request(f"{i}", "keep"))) for i in range(2 * SLOTS)]
        await asyncio.sleep(20)
        await controller.pause_generation()
        judge = await controller.generate(request("judge", "serve"))
        assert judge.finish_reason is FinishReason.STOP
        await asyncio.sleep(1000)
        assert not any(task.done() for task in kept)
        await controller.load_weights(Live(), 1)
        await controller.continue_generation()
        answers = await asyncio.gather(*kept)
        assert [answer.steps for answer in answers] == [((0, 40), (1, 60))] * SLOTS + [((1, 100),)] * SLOTS
        await controller.close()

    run_virtual(main(), deadline=1e6)


def test_sleep_waits_for_what_is_kept_and_served_and_holds_the_rest_until_wake() -> None:
    async def main() -> None:
        controller = build(fifty_seconds(), request_timeout_s=60.0, control_timeout_s=5.0)
        running = [asyncio.create_task(controller.generate(request(f"{i}", "keep"))) for i in range(2)]
        running.append(asyncio.create_task(controller.generate(request("judge", "serve"))))
        await asyncio.sleep(20)
        await controller.pause_generation()
        await asyncio.sleep(15)
        began = asyncio.get_running_loop().time()
        await controller.sleep()
        assert asyncio.get_running_loop().time() - began == pytest.approx(30.0, abs=1.0)
        assert {answer.steps for answer in await asyncio.gather(*running)} == {((0, 100),)}
        late = asyncio.create_task(controller.generate(request("late", "serve")))
        scoring = asyncio.create_task(controller.score(pack_ids([1, 2])))
        await asyncio.sleep(500)
        assert not late.done() and not scoring.done()
        await controller.wake()
        assert len(await scoring) == 4
        assert (await late).finish_reason is FinishReason.STOP
        assert (await controller.generate(request("refused"))).finish_reason is FinishReason.ABORT
        await controller.continue_generation()
        assert (await controller.stats()).engines == 1
        await controller.close()

    run_virtual(main(), deadline=1e6)


def test_a_request_that_comes_as_the_last_one_ends_waits_for_the_engines_to_wake() -> None:
    async def main() -> None:
        controller = build(fifty_seconds(pause_s=0.5))
        first = asyncio.create_task(controller.generate(request("judge", "serve")))
        await asyncio.sleep(20)
        await controller.pause_generation()
        sleeping = asyncio.create_task(controller.sleep())
        await first
        await asyncio.sleep(0.2)
        assert not sleeping.done()
        late = asyncio.create_task(controller.generate(request("late", "serve")))
        await sleeping
        assert (await controller.stats()).engines == 1
        await controller.wake()
        assert (await late).finish_reason is FinishReason.STOP
        await controller.close()

    run_virtual(main(), deadline=1e6)


def test_a_kept_request_that_never_ends_is_waited_for_no_longer_than_a_request_may_take() -> None:
    async def main() -> None:
        controller = build(fifty_seconds(faults=EngineFaults(hangs=1.0)), request_timeout_s=60.0, failures_to_fence=99)
        asking = asyncio.create_task(controller.generate(request("x", "keep")))
        await asyncio.sleep(20)
        await controller.pause_generation()
        began = asyncio.get_running_loop().time()
        await controller.sleep()
        assert asyncio.get_running_loop().time() - began == pytest.approx(3 * 60.0, abs=1.0), "three tries"
        with pytest.raises(InfrastructureFailure, match="did not answer x within 60 s"):
            await asking
        await controller.close()

    run_virtual(main(), deadline=1e6)


def test_who_reads_a_stream_slowly_does_not_use_up_the_engines_time() -> None:
    async def main() -> None:
        controller = build(fifty_seconds(), request_timeout_s=60.0)
        read = 0
        async with contextlib.aclosing(controller.stream(request("slow"))) as pieces:
            async for piece in pieces:
                read += len(piece.ids) // 4
                await asyncio.sleep(20.0)
        assert read == 100
        await controller.close()

    run_virtual(main(), deadline=1e6)


def test_an_engine_that_stops_in_the_middle_of_a_stream_is_late_however_slowly_it_is_read() -> None:
    async def main() -> None:
        engine = fifty_seconds()
        controller = build(engine, request_timeout_s=60.0, failures_to_fence=99)
        waited = 0.0
        with pytest.raises(InfrastructureFailure, match="did not answer slow within 60 s"):
            async with contextlib.aclosing(controller.stream(request("slow", "keep"))) as pieces:
                async for _ in pieces:
                    await asyncio.sleep(20.0)
                    await engine.pause_generation()  # behind the controller's back
                    waited = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - waited <= 3 * 60.0
        await controller.close()

    run_virtual(main(), deadline=1e6)
