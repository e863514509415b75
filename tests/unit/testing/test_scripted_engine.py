"""The scripted engine: the contract of all engines as far as it goes without a model, and what its script says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from engine_contract import ABOUT_THE_MODEL, CONTRACT, Subject, Tensors

from penstock.errors import InfrastructureFailure
from penstock.ports import Completion, GenerateRequest, OnPause
from penstock.rollout import FinishReason, SampleParams, unpack_ids
from penstock.testing import EngineFaults, EngineScript, ScriptedEngine, constant, run_virtual


class NoWeights:
    def tensors(self):  # type: ignore[no-untyped-def]
        yield from ()


def request(
    name: str = "a",
    *,
    seed: int = 1,
    response_ids: bytes = b"",
    max_tokens: int = 256,
    on_pause: OnPause = "abort",
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=b"\1\0\0\0",
        response_ids=response_ids,
        params=SampleParams(max_tokens=max_tokens),
        seed=seed,
        on_pause=on_pause,
    )


def ten_a_second(**script: object) -> ScriptedEngine:
    return ScriptedEngine(EngineScript(tokens_per_s=10.0, length=constant(20), **script))  # type: ignore[arg-type]


async def started(engine: ScriptedEngine, asked: GenerateRequest, seconds: float) -> asyncio.Task[Completion]:
    task = asyncio.create_task(engine.generate(asked))
    await asyncio.sleep(seconds)
    return task


@pytest.mark.parametrize(
    "check", [check for check in CONTRACT if check not in ABOUT_THE_MODEL], ids=lambda check: check.__name__
)
def test_the_contract(check: Callable[[Subject], Awaitable[None]]) -> None:
    def no_model(ids: object, temperature: float) -> np.ndarray:
        raise AssertionError("this engine has no model")

    script = EngineScript(slots=6, tokens_per_s=1000.0, length=constant(5000))
    subject = Subject(make=lambda: ScriptedEngine(script), other_weights=Tensors({}), reference=no_model)
    run_virtual(check(subject))


def test_an_answer_takes_as_long_as_its_tokens() -> None:
    async def main() -> tuple[Completion, float]:
        completion = await ten_a_second(latency_s=constant(1.0)).generate(request())
        return completion, asyncio.get_running_loop().time()

    completion, seconds = run_virtual(main())
    assert seconds == pytest.approx(3.0)
    assert len(completion.ids) == 80
    assert completion.finish_reason is FinishReason.STOP
    assert completion.steps == ((0, 20),)


def test_the_budget_cuts_an_answer() -> None:
    completion = run_virtual(ten_a_second().generate(request(max_tokens=7)))
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.ids) == 28


def test_a_pause_finds_the_tokens_there_was_time_for_and_the_answer_goes_on_the_same() -> None:
    async def main() -> tuple[bytes, bytes, tuple[tuple[int, int], ...]]:
        whole = await ten_a_second().generate(request())
        engine = ten_a_second()
        task = await started(engine, request(), 0.55)
        await engine.pause_generation()
        first = await task
        assert first.finish_reason is FinishReason.ABORT
        assert len(first.ids) == 20
        await engine.load_weights(NoWeights(), 3)
        await engine.continue_generation()
        rest = await engine.generate(request(response_ids=first.ids))
        return whole.ids, first.ids + rest.ids, first.steps + rest.steps

    whole, joined, steps = run_virtual(main())
    assert joined == whole
    assert steps == ((0, 5), (3, 15))


def test_a_request_to_a_paused_engine_ends_at_once_with_nothing() -> None:
    async def main() -> Completion:
        engine = ten_a_second()
        await engine.pause_generation()
        return await engine.generate(request())

    completion = run_virtual(main())
    assert completion.finish_reason is FinishReason.ABORT
    assert not completion.ids


def test_a_kept_request_goes_on_under_the_new_weights() -> None:
    async def main() -> Completion:
        engine = ten_a_second()
        task = await started(engine, request(on_pause="keep"), 0.55)
        await engine.pause_generation()
        await asyncio.sleep(100)
        await engine.load_weights(NoWeights(), 1)
        await engine.continue_generation()
        return await task

    assert run_virtual(main()).steps == ((0, 5), (1, 15))


def test_requests_wait_for_a_slot_and_a_cancelled_one_frees_its_slot() -> None:
    async def main() -> float:
        engine = ten_a_second(slots=1)
        first = await started(engine, request("a"), 0.0)
        second = await started(engine, request("b"), 1.0)
        first.cancel()
        await second
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(3.0)


def test_an_abort_reaches_only_the_named_requests() -> None:
    async def main() -> list[FinishReason]:
        engine = ten_a_second()
        tasks = [await started(engine, request(name), 0.0) for name in "ab"]
        await asyncio.sleep(0.5)
        await engine.abort(["b", "unknown"])
        return [(await task).finish_reason for task in tasks]

    assert run_virtual(main()) == [FinishReason.STOP, FinishReason.ABORT]


def test_a_failing_engine_raises() -> None:
    with pytest.raises(InfrastructureFailure):
        run_virtual(ten_a_second(faults=EngineFaults(fails=1.0)).generate(request()))


def test_a_hanging_request_hears_no_abort() -> None:
    async def main() -> bool:
        engine = ten_a_second(faults=EngineFaults(hangs=1.0))
        task = await started(engine, request(), 1.0)
        await engine.pause_generation()
        await asyncio.sleep(1000)
        return task.done()

    assert not run_virtual(main())


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_nonsense_is_nonsense_in_one_of_three_ways(tokens: int) -> None:
    engine = ScriptedEngine(EngineScript(length=constant(tokens), faults=EngineFaults(nonsense=1.0)))
    completion = run_virtual(engine.generate(request()))
    n = len(unpack_ids(completion.ids))
    logprobs = np.frombuffer(completion.logprobs, dtype=np.float32)
    assert len(logprobs) != n or n == 0 or not np.isfinite(logprobs).all()


def test_a_wrong_version_is_newer_than_the_weights() -> None:
    engine = ten_a_second(faults=EngineFaults(wrong_version=1.0))
    assert run_virtual(engine.generate(request())).steps[0][0] > 0
