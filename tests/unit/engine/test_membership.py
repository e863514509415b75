"""Engines that join and leave while the others serve."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_fakes import FakeEngine, Kept, Live, Reporter, ask_all, request, until

from penstock.engine import RolloutControllerConfig
from penstock.engine.controller import RolloutController
from penstock.errors import InfrastructureFailure, ModelError, RunError
from penstock.ports import Completion, GenerateRequest
from penstock.rollout import FinishReason, pack_ids, pack_logprobs, unpack_ids
from penstock.testing.clock import run_virtual


class Typist(FakeEngine):
    """One token every tenth of a second, its place in the answer; an abort gives back what is there."""

    mute = False
    """Whatever it computes, nobody hears of it."""

    async def generate(self, request: GenerateRequest) -> Completion:
        self._alive()
        begun = len(request.response_ids) // 4
        if self.paused and request.on_pause == "abort":
            return self._answer(begun, begun, FinishReason.ABORT)
        self.served.append(request.request_id)
        aborted = self._running[request.request_id] = asyncio.get_running_loop().create_future()
        self._on_pause[request.request_id] = request.on_pause
        place = begun
        try:
            while place < request.params.max_tokens:
                try:
                    async with asyncio.timeout(0.1):
                        await asyncio.shield(aborted)
                    return self._answer(begun, place, FinishReason.ABORT)
                except TimeoutError:
                    self._alive()
                    place += not (self.paused and request.on_pause == "keep")
            if self.mute:
                await asyncio.Event().wait()
        finally:
            del self._running[request.request_id]
        return self._answer(begun, place, FinishReason.LENGTH)

    def _answer(self, begun: int, place: int, reason: FinishReason) -> Completion:
        made = place - begun
        steps = ((self.step, made),) if made else ()
        ids, logprobs = pack_ids(list(range(begun, place))), pack_logprobs([-1.0] * made)
        return Completion(ids=ids, logprobs=logprobs, finish_reason=reason, steps=steps)


class Fleet:
    """Engines that can be looked at, and a controller that can have more."""

    def __init__(self, names: str = "ab", kind: type[FakeEngine] = Typist, **limits: Any) -> None:
        self.engines: dict[str, Any] = {name: kind() for name in names}
        self.next = kind

        async def new_engine(name: str) -> Any:
            self.engines[name] = self.next()
            return self.engines[name]

        self.controller: RolloutController = RolloutControllerConfig(**limits).build(
            dict(self.engines), observer=Reporter(self.engines), new_engine=new_engine
        )

    async def states(self) -> dict[str, str]:
        return {member.name: member.state for member in await self.controller.members()}

    async def __aenter__(self) -> Fleet:
        await self.controller.check_health()
        await until(lambda: all(engine.state == "active" for engine in self.engines.values()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.controller.close()


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_that_joins_is_given_the_published_weights_before_it_serves(seed: int) -> None:
    async def main() -> None:
        async with Fleet() as fleet:
            await fleet.controller.load_weights(Kept(), 7)
            asking = asyncio.create_task(ask_all(fleet.controller, 30))
            name = await fleet.controller.add_engine()
            assert name == "engine-0" and fleet.engines[name].loads == [7]
            assert await fleet.states() == {"a": "active", "b": "active", "engine-0": "active"}
            answers = [*await asking, *await ask_all(fleet.controller, 12)]
            assert all(answer.steps == ((7, 4),) for answer in answers)
            assert fleet.engines[name].served
            await fleet.controller.load_weights(Kept(), 8)
            assert fleet.engines[name].loads == [7, 8]

    run_virtual(main(), seed=seed, deadline=1000.0)


def test_an_engine_that_joins_a_paused_fleet_is_paused_and_sleeps_like_the_others() -> None:
    async def main() -> None:
        async with Fleet() as fleet:
            await fleet.controller.pause_generation()
            await fleet.controller.sleep()
            name = await fleet.controller.add_engine()
            assert fleet.engines[name].paused and fleet.engines[name].asleep

    run_virtual(main(), deadline=1000.0)


def test_weights_that_nobody_kept_reach_an_engine_that_joined_with_the_next_sync() -> None:
    async def main() -> None:
        async with Fleet() as fleet:
            await fleet.controller.load_weights(Live(), 3)
            name = await fleet.controller.add_engine()
            assert (await fleet.states())[name] == "recovering"
            await ask_all(fleet.controller, 6)
            assert not fleet.engines[name].served
            await fleet.controller.load_weights(Live(), 4)
            await until(lambda: fleet.engines[name].state == "active")
            assert fleet.engines[name].step == 4

    run_virtual(main(), deadline=1000.0)


@pytest.mark.parametrize("trouble", ["refuses", "dead", "slow", "cancelled"])
def test_an_engine_that_does_not_come_is_closed_and_the_others_go_on(trouble: str) -> None:
    class Bad(Typist):
        def __init__(self) -> None:
            super().__init__(restarts=False)
            self.dead = trouble == "dead"
            self.health_s = 1e6 if trouble in ("slow", "cancelled") else 0.0

        async def check_health(self) -> None:
            if trouble == "refuses":
                raise ModelError("no such model")
            await super().check_health()

    async def main() -> None:
        async with Fleet(start_timeout_s=60.0) as fleet:
            fleet.next = Bad
            adding = asyncio.create_task(fleet.controller.add_engine())
            if trouble == "cancelled":
                await asyncio.sleep(1.0)
                adding.cancel()
            with pytest.raises((InfrastructureFailure, asyncio.CancelledError)) as error:
                await adding
            told = {
                "refuses": "engine engine-0 cannot join: no such model",
                "dead": "engine engine-0 did not join within 60 s: .*no such device",
                "slow": "engine engine-0 did not join within 60 s",
                "cancelled": "",
            }
            assert error.match(told[trouble])
            assert await fleet.states() == {"a": "active", "b": "active"}
            assert fleet.engines["engine-0"].dead, "it was closed"
            fleet.next = Typist
            assert await fleet.controller.add_engine() == "engine-1", "a name is used once"

    run_virtual(main(), deadline=1000.0)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_drained_engine_was_asked_goes_on_elsewhere_with_the_tokens_it_has(seed: int) -> None:
    async def main() -> None:
        async with Fleet(kind=Typist) as fleet:
            asking = asyncio.create_task(ask_all(fleet.controller, 10))
            await asyncio.sleep(0.25)
            before = list(fleet.engines["a"].served)
            await fleet.controller.drain_engine("a")
            assert asyncio.get_running_loop().time() < 5 and not asking.done()
            answers = await asking
            assert [list(unpack_ids(answer.ids)) for answer in answers] == [[0, 1, 2, 3]] * 10
            assert all(answer.finish_reason is FinishReason.LENGTH and answer.steps == ((0, 4),) for answer in answers)
            assert before and set(before) <= set(fleet.engines["b"].served)
            assert fleet.engines["a"].dead and fleet.engines["a"].state == "left"
            assert await fleet.states() == {"b": "active"}
            await ask_all(fleet.controller, 4)
            assert fleet.engines["a"].served == before, "it is asked nothing more"

    run_virtual(main(), seed=seed, deadline=1000.0)


def test_a_stream_goes_on_elsewhere_and_hands_every_token_out_once() -> None:
    class Streaming(Typist):
        async def stream(self, request: GenerateRequest) -> Any:
            begun = len(request.response_ids) // 4
            aborted = self._running[request.request_id] = asyncio.get_running_loop().create_future()
            try:
                for place in range(begun, request.params.max_tokens):
                    try:
                        async with asyncio.timeout(0.1):
                            await asyncio.shield(aborted)
                        yield self._answer(place, place, FinishReason.ABORT)
                        return
                    except TimeoutError:
                        yield self._answer(place, place + 1, None)  # type: ignore[arg-type]
            finally:
                del self._running[request.request_id]
            yield self._answer(0, 0, FinishReason.LENGTH)

    async def main() -> None:
        async with Fleet(kind=Streaming) as fleet:
            pieces = []

            async def read() -> None:
                async for piece in fleet.controller.stream(request("s")):
                    pieces.append(piece)

            reading = asyncio.create_task(read())
            await asyncio.sleep(0.25)
            await fleet.controller.drain_engine("a" if fleet.engines["a"]._running else "b")
            await reading
            assert [list(unpack_ids(piece.ids)) for piece in pieces if piece.ids] == [[0], [1], [2], [3]]
            assert [piece.finish_reason for piece in pieces] == [None] * 4 + [FinishReason.LENGTH]

    run_virtual(main(), deadline=1000.0)


def test_what_was_aborted_or_paused_while_the_engine_drains_comes_back_with_what_it_has() -> None:
    class Slow(Typist):
        async def abort(self, request_ids: Any) -> None:
            await asyncio.sleep(0.5)
            await super().abort(request_ids)

    async def main() -> None:
        async with Fleet(kind=Slow) as fleet:
            asking = [
                asyncio.create_task(fleet.controller.generate(request(name, on_pause=on_pause)))
                for name, on_pause in (("one", "abort"), ("two", "abort"), ("kept", "keep"), ("kept too", "keep"))
            ]
            await asyncio.sleep(0.15)
            draining = asyncio.create_task(fleet.controller.drain_engine("a"))
            await asyncio.sleep(0.05)
            await fleet.controller.pause_generation()
            await draining
            assert [(await answer).finish_reason for answer in asking[:2]] == [FinishReason.ABORT] * 2
            assert not any(answer.done() for answer in asking[2:])
            await fleet.controller.continue_generation()
            for answer in asking[2:]:
                assert list(unpack_ids((await answer).ids)) == [0, 1, 2, 3]

    run_virtual(main(), deadline=1000.0)


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_an_engine_that_does_not_give_its_requests_back_loses_them(how: str) -> None:
    async def main() -> None:
        async with Fleet(kind=Typist, control_timeout_s=5.0) as fleet:
            asking = asyncio.create_task(ask_all(fleet.controller, 6))
            await asyncio.sleep(0.15)
            if how == "hangs":
                fleet.engines["a"].control_hangs = fleet.engines["a"].mute = True
            else:
                fleet.engines["a"].die()
            await fleet.controller.drain_engine("a")
            assert all(answer.steps == ((0, 4),) for answer in await asking)
            assert await fleet.states() == {"b": "active"}

    run_virtual(main(), deadline=1000.0)


def test_the_last_engine_and_an_unknown_one_are_not_drained() -> None:
    async def main() -> None:
        async with Fleet() as fleet:
            with pytest.raises(RunError, match="there is no engine 'c' to drain; the engines are a, b"):
                await fleet.controller.drain_engine("c")
            await fleet.controller.drain_engine("b")
            with pytest.raises(RunError, match="engine a cannot leave: no other engine serves; add one first"):
                await fleet.controller.drain_engine("a")
            await ask_all(fleet.controller, 3)
            await fleet.controller.add_engine()
            await fleet.controller.drain_engine("a")
            assert await fleet.states() == {"engine-0": "active"}
            assert all(answer.steps == ((0, 4),) for answer in await ask_all(fleet.controller, 3))

    run_virtual(main(), deadline=1000.0)


def test_engines_in_this_process_are_as_many_as_they_are() -> None:
    async def main() -> None:
        controller = RolloutControllerConfig().build({"a": FakeEngine()})  # type: ignore[dict-item]
        with pytest.raises(RunError, match="no engine can be added"):
            await controller.add_engine()
        await controller.close()

    run_virtual(main())


def test_tokens_of_an_engine_that_left_stay_counted() -> None:
    async def main() -> None:
        async with Fleet() as fleet:
            await ask_all(fleet.controller, 8)
            before = (await fleet.controller.stats()).generated_tokens
            await fleet.controller.drain_engine("a")
            assert before == 32 and (await fleet.controller.stats()).generated_tokens == before

    run_virtual(main(), deadline=1000.0)


@pytest.mark.parametrize("seed", range(10))
def test_engines_come_and_go_under_load_and_no_answer_is_lost_or_doubled(seed: int) -> None:
    async def main() -> None:
        async with Fleet(names="abc") as fleet:
            controller = fleet.controller

            async def change() -> None:
                for step in range(1, 7):
                    await asyncio.sleep(0.3)
                    name = await controller.add_engine()
                    await controller.load_weights(Kept(), step)
                    others = [member.name for member in await controller.members() if member.name != name]
                    await asyncio.gather(*map(controller.drain_engine, others[:2]))

            changing = asyncio.create_task(change())
            rounds = [await ask_all(controller, 12) for _ in range(20)]
            await changing
            for answer in (answer for answers in rounds for answer in answers):
                assert list(unpack_ids(answer.ids)) == [0, 1, 2, 3]
                assert sum(count for _, count in answer.steps) == 4

    run_virtual(main(), seed=seed, deadline=1000.0)
