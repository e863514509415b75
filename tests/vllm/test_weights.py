"""The trainer's weights in vLLM, and what happens to its processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from adapter_batches import Given, make_batch, scored_by, scored_by_trainer, trained_worker
from engine_contract import LONG, PROMPTS, ask, has_made, ids_of

from penstock.engine import RolloutControllerConfig
from penstock.engine.health import Standing
from penstock.engine.process import ProcessEngine
from penstock.errors import InfrastructureFailure, WeightSyncError
from penstock.events import EngineChanged, Event
from penstock.learn import LoRAConfig, TrainWorkerConfig
from penstock.learn.worker import TorchTrainWorker
from penstock.rollout import FinishReason
from penstock.weights import WriterSettings, build_channel

NUM_REQUESTS = 256
DEADLINE = 280.0
"""For a test that starts vLLM again on a busy machine."""


@pytest.fixture(scope="module")
def engine(start: Callable[..., ProcessEngine]) -> ProcessEngine:
    return start(max_running=NUM_REQUESTS, kv_cache_gb=1.0)


@pytest.fixture
def worker(model_dir: Path) -> TorchTrainWorker:
    """The trainer with weights that are not the engine's."""
    worker = TrainWorkerConfig().build(model_dir, total_steps=1, deterministic=False, threads=1)
    generator = torch.Generator().manual_seed(1)
    for _, tensor in worker.weights.tensors():
        tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return worker


def likeliest(worker: TorchTrainWorker, prompt: list[int], answer: list[int]) -> list[int]:
    """What the trainer would have answered at each place."""
    with torch.inference_mode():
        logits = worker.model(torch.tensor([[*prompt, *answer]])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("way", ["shared memory", "disk"])
def test_after_a_sync_greedy_answers_are_the_trainers_and_before_they_are_not(
    way: str, run: Callable[..., Any], engine: ProcessEngine, worker: TorchTrainWorker, model_dir: Path, tmp_path: Path
) -> None:
    async def answers() -> list[list[int]]:
        requests = [ask(f"{i}", prompt, temperature=0.0, max_tokens=20) for i, prompt in enumerate(PROMPTS)]
        return [ids_of(completion) for completion in await asyncio.gather(*map(engine.generate, requests))]

    async def check() -> None:
        def channel(weights: Any) -> Any:
            if way == "shared memory":
                return build_channel(weights, engine, WriterSettings(kind="shared_memory"))
            return build_channel(weights, engine, WriterSettings(kind="disk", directory=str(tmp_path)))

        untrained = TrainWorkerConfig().build(model_dir, total_steps=1, deterministic=False, threads=1)
        first, second = channel(untrained.weights), channel(worker.weights)
        await first.publish(0)
        for prompt, answer in zip(PROMPTS, await answers(), strict=True):
            assert answer != likeliest(worker, prompt, answer)
            assert answer == likeliest(untrained, prompt, answer)
        published = await second.publish(3)
        print(f"\nsync through {way}: {published.seconds:.3f} s, {published.num_bytes} bytes")
        assert await engine.model_step() == 3
        for prompt, answer in zip(PROMPTS, await answers(), strict=True):
            assert answer == likeliest(worker, prompt, answer)
        await first.close()
        await second.close()

    run(check())


@pytest.mark.parametrize("way", ["shared memory", "disk"])
@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_after_a_sync_it_scores_as_the_trainer_with_its_adapter_and_not_as_the_base(
    sync: Any, way: str, run: Callable[..., Any], engine: ProcessEngine, model_dir: Path, tmp_path: Path
) -> None:
    trainer, batch = trained_worker(model_dir, LoRAConfig(rank=4, sync=sync))
    trained = scored_by_trainer(trainer, batch)
    untrained = TrainWorkerConfig().build(model_dir, total_steps=1, threads=1)

    async def check() -> int:
        await engine.load_weights(untrained.weights, 0)
        base = await scored_by(engine, batch)
        assert np.abs(base - trained).max() > 0.3
        channel: Any = build_channel(trainer.weights, engine, WriterSettings(kind="shared_memory"))
        if way == "disk":
            channel = build_channel(trainer.weights, engine, WriterSettings(kind="disk", directory=str(tmp_path)))
        for step in (1, 2):
            # The second finds the first's sum in the engine, not the base.
            sent = await channel.publish(step)
            assert await engine.model_step() == step
            np.testing.assert_allclose(await scored_by(engine, batch), trained, atol=1e-4)
        await channel.close()
        return sent.num_bytes

    whole = sum(tensor.nbytes for _, tensor in untrained.weights.tensors())
    assert (run(check()) < whole / 2) == (sync == "adapter")


def test_an_adapter_that_binds_no_layer_of_it_is_refused_and_the_old_weights_are_kept(
    run: Callable[..., Any], engine: ProcessEngine
) -> None:
    batch = make_batch(1)
    nowhere = Given({"nowhere.lora_A": torch.zeros(4, 64), "nowhere.lora_B": torch.zeros(64, 4)})

    async def check() -> None:
        step, before = await engine.model_step(), await scored_by(engine, batch)
        with pytest.raises(WeightSyncError, match=r"has no nowhere\.weight; use lora\.sync='merged'"):
            await engine.load_weights(nowhere, 9)
        assert await engine.model_step() == step
        assert np.array_equal(await scored_by(engine, batch), before)

    run(check())


def test_pause_with_256_requests_in_flight_hands_back_every_partial_token(
    run: Callable[..., Any], engine: ProcessEngine
) -> None:
    async def check() -> None:
        before = (await engine.stats()).generated_tokens
        step = await engine.model_step()
        requests = [ask(f"{i}", seed=i, max_tokens=LONG) for i in range(NUM_REQUESTS)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await has_made(engine, before + 2 * NUM_REQUESTS)
        started = time.perf_counter()
        await engine.pause_generation()
        completions = await asyncio.gather(*tasks)
        print(f"\npause with {NUM_REQUESTS} requests: {time.perf_counter() - started:.3f} s")
        assert {completion.finish_reason for completion in completions} == {FinishReason.ABORT}
        made = [len(ids_of(completion)) for completion in completions]
        assert min(made) > 0
        assert sum(made) == (await engine.stats()).generated_tokens - before
        assert {completion.steps for completion in completions} == {((step, n),) for n in made}
        await engine.continue_generation()
        # Each goes on where it was.
        for i in (0, NUM_REQUESTS - 1):
            given = ids_of(completions[i])
            rest = await engine.generate(ask(f"{i}", seed=i, given=given, max_tokens=len(given) + 3))
            assert len(ids_of(rest)) == 3

    run(check())


def processes_of(engine: ProcessEngine) -> list[psutil.Process]:
    assert engine.pid is not None
    process = psutil.Process(engine.pid)
    return [process, *process.children(recursive=True)]


def kill_the_model_of(engine: ProcessEngine) -> None:
    """vLLM's own process, the one that holds the model."""
    models = [process for process in processes_of(engine)[1:] if process.memory_info().rss > 200 << 20]
    assert models, "no process of vLLM's holds the model"
    for process in models:
        process.kill()


def test_killed_it_takes_its_processes_along_and_a_restart_begins_at_step_0(
    run: Callable[..., Any], engine: ProcessEngine, worker: TorchTrainWorker
) -> None:
    async def check() -> None:
        await engine.load_weights(worker.weights, 4)
        processes = processes_of(engine)
        assert len(processes) > 1
        serving = asyncio.create_task(engine.generate(ask("serving", max_tokens=LONG)))
        await has_made(engine, (await engine.stats()).generated_tokens + 1)
        processes[0].kill()
        with pytest.raises(InfrastructureFailure, match="SIGKILL"):
            await serving
        _, alive = await asyncio.to_thread(psutil.wait_procs, processes[1:], timeout=10)
        assert not alive
        await engine.restart()
        assert await engine.model_step() == 0
        await engine.load_weights(worker.weights, 4)
        answer = ids_of(await engine.generate(ask("again", PROMPTS[2], temperature=0.0, max_tokens=20)))
        assert answer == likeliest(worker, PROMPTS[2], answer)

    run(asyncio.wait_for(check(), DEADLINE))


def test_the_controller_restarts_it_with_the_current_weights_and_finishes_what_it_served(
    run: Callable[..., Any], engine: ProcessEngine, worker: TorchTrainWorker
) -> None:
    async def check() -> None:
        limits = RolloutControllerConfig(unavailable_timeout_s=DEADLINE, start_timeout_s=DEADLINE)
        controller = limits.build({"vllm": engine}, standing=Standing(model_step=await engine.model_step()))
        channel = build_channel(worker.weights, controller, WriterSettings(kind="shared_memory"))
        await channel.publish(5)
        expected = [ids_of(await controller.generate(ask("e", prompt, temperature=0.0))) for prompt in PROMPTS]
        before = (await engine.stats()).generated_tokens
        pending = [
            asyncio.create_task(controller.generate(ask(f"{i}", prompt, temperature=0.0, max_tokens=LONG)))
            for i, prompt in enumerate(PROMPTS)
        ]
        await has_made(engine, before + 10)
        kill_the_model_of(engine)
        for answer, completion in zip(expected, await asyncio.gather(*pending), strict=True):
            assert ids_of(completion)[: len(answer)] == answer
            assert completion.steps == ((5, LONG),)
        await channel.close()
        await controller.close()

    run(asyncio.wait_for(check(), DEADLINE))


def test_of_two_behind_one_controller_a_killed_one_is_fenced_its_work_is_done_by_the_other_and_it_returns(
    run: Callable[..., Any], make: Callable[..., ProcessEngine], worker: TorchTrainWorker
) -> None:
    engines = {"one": make(), "two": make()}

    states: dict[str, str] = {}

    class Watching:
        def notice(self, event: Event) -> None:
            if isinstance(event, EngineChanged):
                states[event.engine] = event.state

    async def active(*names: str) -> None:
        while any(states.get(name) != "active" for name in names):  # noqa: ASYNC110 - as a user sees it
            await asyncio.sleep(0.01)

    async def check() -> None:
        controller = RolloutControllerConfig(start_timeout_s=DEADLINE).build(engines, observer=Watching())
        channel = build_channel(worker.weights, controller, WriterSettings(kind="shared_memory"))
        await controller.check_health()
        await active(*engines)
        await channel.publish(2)
        asked = [ask(f"{i}", PROMPTS[i % len(PROMPTS)], temperature=0.0, max_tokens=300) for i in range(12)]
        expected = [ids_of(completion) for completion in await asyncio.gather(*map(controller.generate, asked))]
        assert all([(await engine.stats()).generated_tokens > 0 for engine in engines.values()])

        made = (await engines["one"].stats()).generated_tokens
        pending = [asyncio.create_task(controller.generate(request)) for request in asked]
        await has_made(engines["one"], made + 6)
        kill_the_model_of(engines["one"])
        async with asyncio.timeout(10):
            while states["one"] == "active":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        completions = await asyncio.gather(*pending)
        assert [ids_of(completion) for completion in completions] == expected
        assert {completion.steps for completion in completions} == {((2, 300),)}

        # A sync while it is away: it returns with what is current then.
        await channel.publish(3)
        await active("one")
        assert await engines["one"].model_step() == 3
        again = await asyncio.gather(*map(controller.generate, asked))
        assert {completion.steps for completion in again} == {((3, 300),)}
        await channel.close()
        await controller.close()

    run(asyncio.wait_for(check(), DEADLINE))
