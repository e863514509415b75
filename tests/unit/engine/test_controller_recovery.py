"""Engines that die, hang or do not come back, behind the controller."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_fakes import FakeEngine, Kept, ask_all, play, request, states, until

from penstock.engine import RolloutControllerConfig
from penstock.engine.controller import RolloutController
from penstock.errors import (
    EngineUnavailable,
    InfrastructureFailure,
    ModelError,
    RunError,
)
from penstock.testing.clock import run_virtual


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_killed_while_serving_is_fenced_and_its_requests_are_answered_elsewhere(seed: int) -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        asking = asyncio.create_task(ask_all(controller, 20))
        await asyncio.sleep(0.5)
        lost = list(engines["a"].served)
        engines["a"].die()
        await until(lambda: engines["a"].state != "active")
        assert asyncio.get_running_loop().time() < 10
        answers = await asking
        assert all(answer.steps == ((0, 4),) for answer in answers)
        assert lost and set(lost) <= set(engines["b"].served)
        await until(lambda: engines["a"].state == "active")
        assert engines["a"].starts == 2

    play(test, seed=seed)


def test_every_look_at_an_engine_is_told_with_its_weights_and_load() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        await controller.load_weights(Kept(), 4)
        asking = asyncio.create_task(ask_all(controller, 40))
        await asyncio.sleep(5.0)
        seen = engines["a"].seen
        assert (seen.engine, seen.model_step) == ("a", 4)
        await asking

    play(test)


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_killed_while_idle_returns_with_the_current_weights_and_only_then_serves(seed: int) -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        await controller.load_weights(Kept(), 4)
        engines["a"].die()
        started = asyncio.get_running_loop().time()
        await until(lambda: engines["a"].state != "active")
        assert asyncio.get_running_loop().time() - started < 10
        while engines["a"].state != "active":
            answer = await controller.generate(request("x"))
            assert answer.steps == ((4, 4),)
        assert (engines["a"].step, engines["a"].loads) == (4, [4, 4])
        assert all(answer.steps == ((4, 4),) for answer in await ask_all(controller, 8))

    play(test, seed=seed)


def test_an_engine_that_accepts_and_never_answers_loses_the_request_to_another() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        engines["a"].hangs = True
        answers = await ask_all(controller, 6)
        assert all(answer.steps == ((0, 4),) for answer in answers)
        assert asyncio.get_running_loop().time() < 40
        await until(lambda: engines["a"].starts == 2)  # three late answers are a failed series
        await until(lambda: engines["a"].state == "active")

    play(test, request_timeout_s=30.0)


def test_an_engine_that_answers_nothing_at_all_is_fenced_by_its_probes() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        engines["a"].hangs = engines["a"].control_hangs = True
        asking = asyncio.create_task(ask_all(controller, 4))
        await until(lambda: engines["a"].state != "active")
        assert asyncio.get_running_loop().time() < 10
        assert all(answer.steps == ((0, 4),) for answer in await asking)

    play(test, probe_timeout_s=2.0)


def test_an_engine_that_makes_tokens_but_answers_health_checks_late_is_not_fenced_until_it_makes_none() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        engines["a"].health_s = 15.0
        for i in range(100):
            await controller.generate(request(f"{i}", group="one"))
        assert engines["a"].starts == 1 and engines["a"].state == "active"
        await until(lambda: engines["a"].state != "active")
        with pytest.raises(InfrastructureFailure, match="no answer to a health check within 10 s"):
            await controller.check_health()

    play(test, names="a", probe_timeout_s=10.0)


@pytest.mark.parametrize("seed", range(5))
def test_when_no_engine_comes_back_the_error_names_every_engine_and_its_failure(seed: int) -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        for engine in engines.values():
            engine.can_restart = False
            engine.die()
        started = asyncio.get_running_loop().time()
        outcomes = await asyncio.gather(
            *(controller.generate(request(f"{i}")) for i in range(5)), return_exceptions=True
        )
        assert asyncio.get_running_loop().time() - started < 60
        assert {type(outcome) for outcome in outcomes} == {EngineUnavailable}
        with pytest.raises(EngineUnavailable) as error:
            await controller.generate(request("late"))
        for name in engines:
            assert f"{name} is " in str(error.value)
        assert str(error.value).count("no such device") == 2
        for engine in engines.values():
            engine.can_restart = True
        await until(lambda: "active" in states(engines))
        assert (await controller.generate(request("again"))).steps == ((0, 4),)

    play(test, seed=seed)


def test_a_restart_that_takes_longer_than_requests_may_wait_is_waited_for() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        await controller.load_weights(Kept(), 2)
        engines["a"].start_s = 200.0
        engines["a"].die()
        assert (await controller.generate(request("x"))).steps == ((2, 4),)
        assert engines["a"].starts == 2

    play(test, names="a")


def test_a_restart_that_hangs_ends_with_the_start_deadline() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        engines["a"].start_s = 1e6
        engines["a"].die()
        started = asyncio.get_running_loop().time()
        with pytest.raises(EngineUnavailable, match="a is fenced: did not come back within 100 s"):
            await controller.generate(request("x"))
        assert 100 <= asyncio.get_running_loop().time() - started < 110

    play(test, names="a", start_timeout_s=100.0)


def test_a_restart_that_fails_after_the_wait_is_over_ends_it_at_once() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        engines["a"].start_s, engines["a"].can_restart = 80.0, False
        engines["a"].die()
        started = asyncio.get_running_loop().time()
        with pytest.raises(EngineUnavailable, match=r"a is fenced: .*no such device"):
            await controller.generate(request("x"))
        assert asyncio.get_running_loop().time() - started < 85

    play(test, names="a")


def test_an_engine_that_never_starts_is_named_before_the_start_deadline() -> None:
    async def main() -> None:
        engine = FakeEngine(restarts=False)
        engine.dead = True
        controller = RolloutControllerConfig().build({"only": engine})  # type: ignore[dict-item]
        with pytest.raises(EngineUnavailable, match=r"only is .*: InfrastructureFailure"):
            await controller.generate(request("x"))
        assert asyncio.get_running_loop().time() < 60
        await controller.close()

    run_virtual(main())


def test_restart_returns_when_the_engine_serves_again() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        await controller.load_weights(Kept(), 2)
        asking = asyncio.create_task(ask_all(controller, 8))
        await asyncio.sleep(0.5)
        await controller.restart("a")
        assert engines["a"].state == "active"
        assert (engines["a"].starts, engines["a"].step) == (2, 2)
        assert all(answer.steps == ((2, 4),) for answer in await asking)

    play(test)


def test_an_engine_that_was_given_up_is_not_waited_for() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        async def refuse() -> None:
            raise ModelError("the model's directory is gone")

        engines["a"].restart = refuse
        began = asyncio.get_running_loop().time()
        for _ in range(2):
            with pytest.raises(InfrastructureFailure, match=r"engine a was given up: .*directory is gone"):
                await controller.restart("a")
        assert asyncio.get_running_loop().time() - began < 5

    play(test)


def test_restarting_an_unknown_engine_names_the_known_ones() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        with pytest.raises(RunError, match="there is no engine 'engine-7' to restart; the engines are a, b"):
            await controller.restart("engine-7")

    play(test)


def test_how_long_the_engines_worked_is_told_across_restarts() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        await ask_all(controller, 3)
        assert (await controller.stats()).busy_seconds == 3.0
        await controller.restart("a")
        await ask_all(controller, 2)
        stats = await controller.stats()
        assert (stats.busy_seconds, stats.engines) == (5.0, 1)

    play(test, names="a")
