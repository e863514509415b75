"""Weight syncs through the controller, with engines that do not take them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engine_fakes import FakeEngine, Kept, Live, Reporter, ask_all, play, request, states, until

from penstock.engine import RolloutControllerConfig
from penstock.engine.controller import RolloutController
from penstock.errors import (
    EngineUnavailable,
    InfrastructureFailure,
    StateLost,
    WeightSyncError,
)
from penstock.ports import LoadedWeights
from penstock.testing.clock import run_virtual


@pytest.mark.parametrize("how", ["weights", "hang", "other step", "bytes"])
def test_an_engine_that_does_not_confirm_new_weights_serves_nothing_until_it_has_them(how: str) -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        engines["a"].refuses = how
        loaded = await controller.load_weights(Kept(), 1)
        assert loaded == LoadedWeights(model_step=1, checksum="c0ffee")
        assert await controller.model_step() == 1
        assert all(answer.steps == ((1, 4),) for answer in await ask_all(controller, 6))
        await until(lambda: engines["a"].starts == 2)
        engines["a"].refuses = ""
        await until(lambda: engines["a"].state == "active")
        assert engines["a"].step == 1

    play(test, load_timeout_s=20.0)


@pytest.mark.parametrize("how", ["weights", "hang", "other step"])
def test_weights_that_no_engine_confirms_are_not_published_and_the_old_ones_serve_on(how: str) -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        for engine in engines.values():
            engine.refuses = how
        with pytest.raises(WeightSyncError, match=r"weights 1: no engine confirmed them\. a: .*; b: "):
            await controller.load_weights(Kept(), 1)
        assert await controller.model_step() == 0
        assert all(answer.steps == ((0, 4),) for answer in await ask_all(controller, 6))

    play(test, load_timeout_s=20.0)


def test_an_engine_killed_during_a_sync_is_fenced_and_the_sync_holds() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        syncing = asyncio.create_task(controller.load_weights(Kept(), 1))
        await asyncio.sleep(0.05)
        engines["b"].die()
        await syncing
        assert engines["a"].state == "active" != engines["b"].state
        assert await controller.model_step() == 1

    play(test)


def test_an_engine_that_lost_weights_nobody_kept_waits_for_the_next_sync() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        await controller.load_weights(Live(), 1)
        engines["a"].die()
        await asyncio.sleep(200)
        assert (engines["a"].state, engines["b"].state) == ("recovering", "active")
        assert engines["a"].starts == 2, "it waits, it does not restart again and again"
        await controller.load_weights(Live(), 2)
        await until(lambda: engines["a"].state == "active")
        assert {engine.step for engine in engines.values()} == {2}

    play(test)


@pytest.mark.parametrize("weights", [Kept, Live])
def test_engines_with_other_weights_than_the_controller_was_built_for_fail_requests_at_once_and_take_the_next_sync(
    weights: Callable[[], Any],
) -> None:
    async def main() -> None:
        engines = {"a": FakeEngine(), "b": FakeEngine()}
        for engine in engines.values():
            engine.step = 3
        controller = RolloutControllerConfig().build(engines, observer=Reporter(engines))  # type: ignore[arg-type]
        started = asyncio.get_running_loop().time()
        with pytest.raises(EngineUnavailable, match=r"a is recovering: serves model step 3, not 0; .*b is recovering"):
            await controller.generate(request("x"))
        with pytest.raises(InfrastructureFailure, match="serves model step 3, not 0"):
            await controller.check_health()
        await controller.load_weights(weights(), 4)
        assert all(answer.steps == ((4, 4),) for answer in await ask_all(controller, 6))
        assert asyncio.get_running_loop().time() - started < 5
        assert states(engines) == {"active"}
        assert [engine.starts for engine in engines.values()] == [1, 1]
        await controller.close()

    run_virtual(main(), deadline=1000.0)


@pytest.mark.parametrize("how", ["weights", "hang", "other step", "bytes"])
def test_a_sync_to_engines_with_other_weights_that_none_confirms_fails_and_names_them(how: str) -> None:
    async def main() -> None:
        engine = FakeEngine()
        engine.step, engine.refuses = 3, how
        controller = RolloutControllerConfig(load_timeout_s=10.0).build({"a": engine})  # type: ignore[dict-item]
        started = asyncio.get_running_loop().time()
        for _ in range(2):
            with pytest.raises(WeightSyncError, match=r"weights 4: no engine confirmed them\. a: "):
                await controller.load_weights(Kept(), 4)
        assert await controller.model_step() == 0
        assert asyncio.get_running_loop().time() - started < 60
        engine.refuses = ""
        await controller.load_weights(Kept(), 5)
        assert (await controller.generate(request("x"))).steps == ((5, 4),)
        await controller.close()

    run_virtual(main(), deadline=1000.0)


def test_one_engine_with_other_weights_waits_for_the_next_sync_while_the_other_serves() -> None:
    async def main() -> None:
        engines = {"a": FakeEngine(), "b": FakeEngine()}
        engines["a"].step = 3
        controller = RolloutControllerConfig().build(engines, observer=Reporter(engines))  # type: ignore[arg-type]
        assert all(answer.steps == ((0, 4),) for answer in await ask_all(controller, 6))
        assert not engines["a"].served
        await controller.load_weights(Live(), 1)
        await until(lambda: states(engines) == {"active"})
        assert [engine.step for engine in engines.values()] == [1, 1]
        await controller.close()

    run_virtual(main(), deadline=1000.0)


def test_the_last_engine_that_lost_weights_nobody_kept_fails_requests_until_the_next_sync() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        await controller.load_weights(Live(), 1)
        engines["a"].die()
        with pytest.raises(EngineUnavailable, match="a is recovering: serves model step 0, not 1"):
            await controller.generate(request("x"))
        await controller.load_weights(Live(), 2)
        assert (await controller.generate(request("y"))).steps == ((2, 4),)

    play(test, names="a")


def test_the_last_engine_whose_kept_weights_are_gone_takes_those_of_a_sync_that_waits_for_it() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        kept = Kept()
        await controller.load_weights(kept, 1)
        kept.lost = WeightSyncError("whoever had them is gone")
        engines["a"].die()
        # It may only be a line that was cut: it tries again.
        await until(lambda: engines["a"].starts == 3)
        await controller.load_weights(Kept(), 2)
        assert (await controller.generate(request("y"))).steps == ((2, 4),)

    play(test, names="a")


def test_engines_are_given_up_at_once_when_the_trainer_has_lost_the_weights_too() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        kept = Kept()
        await controller.load_weights(kept, 1)
        kept.lost = StateLost("the train ranks are lost, and their weights with them")
        engines["a"].die()
        with pytest.raises(EngineUnavailable, match="a is recovering: serves model step 0, not 1"):
            await controller.generate(request("x"))
        assert engines["a"].starts == 2

    play(test, names="a")


def test_an_engine_that_forgets_its_weights_is_fenced() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        await controller.load_weights(Kept(), 3)
        engines["a"].step = 2
        await until(lambda: engines["a"].state != "active")
        await until(lambda: engines["a"].state == "active")
        assert engines["a"].step == 3

    play(test)
