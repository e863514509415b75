"""The controller over engines that fail on purpose, on the virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.engine import RolloutControllerConfig
from penstock.engine.controller import RolloutController
from penstock.errors import (
    ConfigError,
    DataFailure,
    EngineUnavailable,
    InfrastructureFailure,
    ModelError,
    PenstockError,
    WeightSyncError,
)
from penstock.events import EngineChanged, Event
from penstock.ports import Completion, EngineStats, GenerateRequest, LoadedWeights, OnPause
from penstock.rollout import FailureReason, FinishReason, SampleParams, pack_ids, pack_logprobs
from penstock.testing.clock import run_virtual

NOTHING = Completion(ids=b"", logprobs=b"", finish_reason=FinishReason.ABORT, steps=())


class Kept:
    """Weights that can be read again."""

    def __init__(self, checksum: str = "c0ffee") -> None:
        self.checksum = checksum

    def tensors(self) -> Any:
        return iter(())


class Live:
    """Weights that change with the next train step."""

    def tensors(self) -> Any:
        return iter(())


class FakeEngine:
    """Answers each request after `seconds`, with `tokens` tokens of its model step."""

    def __init__(self, *, seconds: float = 1.0, tokens: int = 4, restarts: bool = True) -> None:
        self.seconds, self.tokens, self.can_restart = seconds, tokens, restarts
        self.step = 0
        self.dead = False
        self.hangs = False
        self.control_hangs = False
        self.spoil: Callable[[Completion], Completion] = lambda completion: completion
        self.refuses: str = ""
        self.paused = False
        self.asleep = False
        self.state = "recovering"
        """What the controller said of it last."""
        self.served: list[str] = []
        self.most_running = 0
        self.loads: list[int] = []
        self.starts = 1
        self.start_s = 1.0
        self.health_s = 0.0
        self._running: dict[str, asyncio.Future[None]] = {}
        self._on_pause: dict[str, str] = {}

    async def generate(self, request: GenerateRequest) -> Completion:
        self._alive()
        if self.paused and request.on_pause == "abort":
            return NOTHING
        if request.group_id == "bad data":
            raise DataFailure("cannot be served", reason=FailureReason.CONTEXT_TOO_LONG)
        self.served.append(request.request_id)
        aborted = self._running[request.request_id] = asyncio.get_running_loop().create_future()
        self._on_pause[request.request_id] = request.on_pause
        self.most_running = max(self.most_running, len(self._running))
        try:
            async with asyncio.timeout(None if self.hangs else self.seconds):
                await aborted
            return NOTHING
        except TimeoutError:
            pass
        finally:
            del self._running[request.request_id]
        ids = [request.seed % 97] * self.tokens
        return self.spoil(
            Completion(
                ids=pack_ids(ids),
                logprobs=pack_logprobs([-1.0] * self.tokens),
                finish_reason=FinishReason.LENGTH,
                steps=((self.step, self.tokens),),
            )
        )

    async def pause_generation(self) -> None:
        await self._obey()
        self.paused = True
        self._end([name for name in self._running if self._on_pause[name] == "abort"])

    async def continue_generation(self) -> None:
        await self._obey()
        self.paused = False

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._obey()
        self._end([name for name in request_ids if name in self._running])

    async def sleep(self) -> None:
        await self._obey()
        self.asleep = True

    async def wake(self) -> None:
        await self._obey()
        self.asleep = False

    async def load_weights(self, source: Any, model_step: int) -> LoadedWeights | None:
        await self._obey()
        await asyncio.sleep(0.1)
        self._alive()
        if self.refuses == "weights":
            raise WeightSyncError("shapes do not fit, the old ones are kept")
        if self.refuses == "hang":
            await asyncio.Event().wait()
        self.loads.append(model_step)
        if self.refuses == "other step":
            return None
        self.step = model_step
        checksum = getattr(source, "checksum", None)
        return LoadedWeights(model_step=model_step, checksum="bits flipped" if self.refuses == "bytes" else checksum)

    async def model_step(self) -> int:
        await self._obey()
        return self.step

    async def check_health(self) -> None:
        await self._obey()
        await asyncio.sleep(self.health_s)

    async def stats(self) -> EngineStats:
        await self._obey()
        return EngineStats(running=len(self._running), generated_tokens=self.tokens * len(self.served))

    async def restart(self) -> None:
        self.starts += 1
        await asyncio.sleep(self.start_s)
        if not self.can_restart:
            raise InfrastructureFailure("no such device", reason=FailureReason.ENGINE_START)
        self.dead = self.hangs = self.control_hangs = False
        self.spoil = lambda completion: completion
        self.step, self.paused, self.asleep = 0, False, False

    async def close(self) -> None:
        self.die()

    def die(self) -> None:
        self.dead = True
        for future in self._running.values():
            if not future.done():
                future.set_exception(InfrastructureFailure("killed by SIGKILL", reason=FailureReason.ENGINE_DIED))

    def _end(self, names: list[str]) -> None:
        for name in names:
            if not self._running[name].done():
                self._running[name].set_result(None)

    def _alive(self) -> None:
        if self.dead:
            raise InfrastructureFailure("killed by SIGKILL", reason=FailureReason.ENGINE_DIED)

    async def _obey(self) -> None:
        self._alive()
        if self.control_hangs:
            await asyncio.Event().wait()


ON_PAUSE: tuple[OnPause, ...] = ("abort", "keep", "serve")


def request(name: str, *, group: str = "", seed: int = 5, on_pause: OnPause = "abort") -> GenerateRequest:
    params = SampleParams(max_tokens=4)
    return GenerateRequest(
        request_id=name, prompt_ids=pack_ids([1]), params=params, seed=seed, group_id=group, on_pause=on_pause
    )


class Reporter:
    """Notes on each engine what the controller says of it."""

    def __init__(self, engines: dict[str, Any]) -> None:
        self._engines = engines

    def notice(self, event: Event) -> None:
        if isinstance(event, EngineChanged):
            assert event.reason
            self._engines[event.engine].state = event.state


def states(engines: dict[str, Any]) -> set[str]:
    return {engine.state for engine in engines.values()}


Test = Callable[[RolloutController, dict[str, Any]], Coroutine[Any, Any, None]]


def play(test: Test, *, seed: int | None = 0, names: str = "ab", **limits: Any) -> dict[str, Any]:
    engines = {name: FakeEngine() for name in names}

    async def main() -> None:
        controller = RolloutControllerConfig(**limits).build(engines, observer=Reporter(engines))  # type: ignore[arg-type]
        try:
            await controller.check_health()
            await until(lambda: states(engines) == {"active"})
            await test(controller, engines)
        finally:
            await controller.close()

    run_virtual(main(), seed=seed, deadline=10_000.0)
    return engines


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - on the virtual clock this costs nothing
        await asyncio.sleep(0.01)


async def ask_all(controller: RolloutController, count: int, **fields: Any) -> list[Completion]:
    return await asyncio.gather(*(controller.generate(request(f"r{i}", **fields)) for i in range(count)))


def test_a_group_stays_on_one_engine_and_groups_go_to_the_least_loaded() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        await asyncio.gather(
            *(controller.generate(request(f"{group}/{i}", group=group)) for i in range(4) for group in "wxyz")
        )
        await controller.generate(request("w/later", group="w"))

    engines = play(test)
    homes = {group: {n for n, e in engines.items() for r in e.served if r.startswith(group)} for group in "wxyz"}
    assert all(len(home) == 1 for home in homes.values())
    assert sorted(len(engine.served) for engine in engines.values()) == [8, 9]


def test_no_engine_gets_more_than_its_share_and_all_are_answered() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        answers = await ask_all(controller, 50)
        assert {answer.finish_reason for answer in answers} == {FinishReason.LENGTH}
        assert (await controller.stats()).generated_tokens == 200

    engines = play(test, max_requests_per_engine=8)
    assert {engine.most_running for engine in engines.values()} == {8}


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


def nonsense(completion: Completion, **changes: Any) -> Completion:
    fields = {name: getattr(completion, name) for name in completion.__struct_fields__}
    return Completion(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": pack_logprobs([-1.0] * 3)},
        {"ids": pack_ids([1, 2, 3])},
        {"ids": b"\x00" * 15},
        {"steps": ((0, 3),)},
        {"logprobs": pack_logprobs([-1.0, float("nan"), -1.0, -1.0])},
        {"logprobs": pack_logprobs([-1.0, float("-inf"), -1.0, -1.0])},
        {"ids": b"", "logprobs": b"", "steps": ()},
        {"steps": ((7, 4),)},
        {"steps": ((0, 2), (-1, 2))},
    ],
)
def test_nonsense_reaches_nobody_and_fences_its_engine(changes: dict[str, Any]) -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        engines["a"].spoil = lambda completion: nonsense(completion, **changes)
        for answer in await ask_all(controller, 12):
            assert np.isfinite(np.frombuffer(answer.logprobs, np.float32)).all()
            assert (len(answer.ids), len(answer.logprobs), answer.steps) == (16, 16, ((0, 4),))
        await until(lambda: engines["a"].starts == 2)

    play(test)


def test_a_request_is_given_to_three_engines_at_most() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        for engine in engines.values():
            engine.spoil = lambda completion: nonsense(completion, logprobs=b"")
        with pytest.raises(InfrastructureFailure, match="0 logprobs"):
            await controller.generate(request("x"))
        assert sorted(len(engine.served) for engine in engines.values()) == [0, 1, 1, 1]

    play(test, names="abcd")


def test_a_request_that_cannot_be_served_is_not_tried_again_and_is_nobodys_failure() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        for i in range(10):
            with pytest.raises(DataFailure):
                await controller.generate(request(f"{i}", group="bad data"))
        assert states(engines) == {"active"}

    play(test)


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


def test_an_engine_that_forgets_its_weights_is_fenced() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        await controller.load_weights(Kept(), 3)
        engines["a"].step = 2
        await until(lambda: engines["a"].state != "active")
        await until(lambda: engines["a"].state == "active")
        assert engines["a"].step == 3

    play(test)


@pytest.mark.parametrize("seed", range(3))
def test_a_pause_is_obeyed_at_once_with_256_requests_in_flight(seed: int) -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        asking = asyncio.create_task(ask_all(controller, 256))
        await asyncio.sleep(0.5)
        now = asyncio.get_running_loop().time()
        await controller.pause_generation()
        answers = await asking
        assert asyncio.get_running_loop().time() - now < 0.1
        assert {answer.finish_reason for answer in answers} == {FinishReason.ABORT}
        assert (await controller.generate(request("new"))).finish_reason is FinishReason.ABORT
        await controller.continue_generation()
        assert (await controller.generate(request("later"))).finish_reason is FinishReason.LENGTH

    play(test, seed=seed, max_requests_per_engine=16)


def test_an_engine_that_does_not_pause_is_fenced_and_the_pause_holds() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        engines["a"].hangs = engines["a"].control_hangs = True
        asking = asyncio.create_task(ask_all(controller, 8))
        await asyncio.sleep(0.1)
        await controller.pause_generation()
        assert engines["a"].state == "fenced"
        assert {answer.finish_reason for answer in await asking} == {FinishReason.ABORT}

    play(test, control_timeout_s=3.0, probe_timeout_s=100.0)


def test_an_engine_that_returns_during_a_pause_is_paused_like_the_others() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        engines["a"].die()
        await until(lambda: engines["a"].state != "active")
        await controller.pause_generation()
        await controller.sleep()
        await until(lambda: engines["a"].state == "active")
        assert engines["a"].paused and engines["a"].asleep
        await controller.wake()
        await controller.continue_generation()
        assert not engines["a"].paused and not engines["a"].asleep

    play(test)


def test_the_clock_of_a_frozen_request_stands_still() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        for engine in engines.values():
            engine.seconds = 1000.0
        asking = asyncio.create_task(controller.generate(request("x", on_pause="keep")))
        await asyncio.sleep(5)
        await controller.pause_generation()
        await asyncio.sleep(500)
        assert not asking.done()
        asking.cancel()

    play(test, request_timeout_s=30.0)


def test_abort_reaches_requests_that_run_and_requests_that_wait() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        asking = [asyncio.create_task(controller.generate(request(f"r{i}"))) for i in range(6)]
        await asyncio.sleep(0.5)
        await controller.abort(["r0", "r5", "unknown"])
        answers = await asyncio.gather(*asking)
        assert [answer.finish_reason == "abort" for answer in answers] == [True, False, False, False, False, True]

    play(test, max_requests_per_engine=1)


def test_cancelled_requests_give_their_places_back() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        asking = [asyncio.create_task(controller.generate(request(f"r{i}"))) for i in range(6)]
        await asyncio.sleep(0.5)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert all(task.cancelled() for task in asking)
        assert len(await ask_all(controller, 2)) == 2
        assert (await controller.stats()).waiting == 0

    play(test, max_requests_per_engine=1)


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


def test_closing_fails_what_waits_and_what_comes_later() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        asking = [asyncio.create_task(controller.generate(request(f"r{i}"))) for i in range(6)]
        await asyncio.sleep(0.5)
        await controller.close()
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            assert isinstance(outcome, InfrastructureFailure)
        with pytest.raises(InfrastructureFailure, match="closed"):
            await controller.generate(request("late"))

    play(test, max_requests_per_engine=1)


def test_a_controller_without_engines_is_refused() -> None:
    with pytest.raises(ConfigError):
        RolloutControllerConfig().build({})


@pytest.mark.parametrize("seed", range(40))
def test_whatever_fails_every_request_ends_and_no_token_carries_weights_that_were_not_published(seed: int) -> None:
    chance = random.Random(seed)

    async def trouble(engines: dict[str, Any]) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(0.2))
            engine = engines[chance.choice(list(engines))]
            what = chance.choice(["die", "hang", "stall", "spoil", "refuse", "obey"])
            if what == "die":
                engine.die()
            elif what == "spoil":
                engine.spoil = lambda completion: nonsense(completion, steps=((99, 4),))
            else:
                engine.hangs, engine.control_hangs = what == "hang", what == "stall"
                engine.refuses = "weights" if what == "refuse" else ""

    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        published = {0}
        breaking = asyncio.create_task(trouble(engines))
        asking = []
        for step in range(1, 30):
            asking += [
                asyncio.create_task(controller.generate(request(f"{step}/{i}", on_pause=chance.choice(ON_PAUSE))))
                for i in range(10)
            ]
            await asyncio.sleep(chance.uniform(0, 5))
            if chance.random() < 0.3:
                await controller.pause_generation()
                await asyncio.sleep(1)
                await controller.continue_generation()
            published.add(step)
            try:
                await controller.load_weights(chance.choice([Kept(), Live()]), step)
            except (WeightSyncError, EngineUnavailable):
                assert await controller.model_step() != step
                published.discard(step)
        breaking.cancel()
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(outcome, PenstockError):
                assert isinstance(outcome, InfrastructureFailure | EngineUnavailable)
            else:
                assert isinstance(outcome, Completion), outcome
                assert {step for step, _ in outcome.steps} <= published
        assert (await controller.stats()).waiting == 0

    play(test, seed=seed, names="abc", max_requests_per_engine=8, request_timeout_s=20.0, control_timeout_s=5.0)
