"""The controller's door: routing, answers that are checked, control calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_fakes import ask_all, nonsense, play, request, states, until

from penstock.engine import RolloutControllerConfig
from penstock.engine.controller import RolloutController
from penstock.errors import (
    ConfigError,
    DataFailure,
    InfrastructureFailure,
)
from penstock.ports import Completion, GenerateRequest
from penstock.rollout import FinishReason, pack_ids, pack_logprobs
from penstock.testing import ScriptedEngine, run_virtual


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


def test_an_answer_says_how_long_its_request_waited_in_line() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        answers = await ask_all(controller, 4)
        assert sorted(round(answer.waited_s, 2) for answer in answers) == [0.0, 0.0, 1.0, 1.0]

    play(test, max_requests_per_engine=1)


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


def test_a_request_that_used_up_its_budget_is_a_finished_answer() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        for engine in engines.values():
            engine.spoil = lambda completion: nonsense(completion, ids=b"", logprobs=b"", steps=())
        full = msgspec.structs.replace(request("full"), response_ids=pack_ids([1, 2, 3, 4]))
        completion = await controller.generate(full)
        assert (completion.ids, completion.finish_reason) == (b"", FinishReason.LENGTH)
        assert [piece.finish_reason async for piece in controller.stream(full)] == [FinishReason.LENGTH]

    play(test)


def test_a_stream_goes_on_with_another_engine_where_one_died() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        pieces = []
        async for piece in controller.stream(request("x")):
            pieces.append(piece)
            if len(pieces) == 2:
                next(engine for engine in engines.values() if engine.served).die()
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason is FinishReason.LENGTH
        assert sorted(len(engine.served) for engine in engines.values()) == [1, 1]
        assert len(pieces) > 4

    play(test)


def test_scores_come_from_another_engine_when_one_fails() -> None:
    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        engines["a"].forgets_scores = 1
        for _ in range(3):
            assert len(await controller.score(pack_ids([1, 2, 3]))) == 8

    play(test)


class InPieces(ScriptedEngine):
    """Streams these."""

    def __init__(self, *pieces: Completion) -> None:
        super().__init__()
        self._pieces = pieces

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        for piece in self._pieces:
            yield piece


ONE = Completion(ids=pack_ids([7]), logprobs=pack_logprobs([-1.0]), finish_reason=None, steps=((0, 1),))
NO_MORE = Completion(ids=b"", logprobs=b"", finish_reason=FinishReason.STOP, steps=())
NOT_A_NUMBER = msgspec.structs.replace(ONE, logprobs=pack_logprobs([float("nan")]))


@pytest.mark.parametrize(
    ("pieces", "good"),
    [((ONE, ONE, NO_MORE), True), ((NO_MORE,), False), ((ONE, NOT_A_NUMBER, NO_MORE), False), ((ONE, ONE), False)],
)
def test_each_piece_of_a_stream_is_checked_before_it_is_handed_on(pieces: tuple[Completion, ...], good: bool) -> None:
    async def main() -> list[Completion]:
        controller = RolloutControllerConfig().build({"only": InPieces(*pieces)}, max_running=1)
        got = []
        try:
            async for piece in controller.stream(request("x")):
                got.append(piece)
        except InfrastructureFailure:
            assert not good
        await controller.close()
        return got

    got = run_virtual(main())
    assert NOT_A_NUMBER not in got
    assert (got[-1:] == [NO_MORE]) is good
