"""What actors cost, and what they take off the driver.

The whole producer, 1,000 rollouts at a time in groups of 8, with an engine and a reward function that take no time: in
this process, and through 2 agent-loop actors and 2 judger actors of a local Ray. Nothing waits for a model, so what is
measured is the processor's time. The bound of the first figure is the machine: in one process there is one processor's
time for everything; with actors every rollout also crosses from a loop's process to a judger's and back, and every
group from the driver's to a loop's, and all of them share this machine's cores.

    cluster.rollouts_vs_local   rollouts per second against in-process
    cluster.driver_share        the driver's processor time per rollout against in-process; at most 0.5

Then whole runs of `quickstart`, in one process and with every part in one actor, the same threads in both, one after
the other and again: their answers, steps and weight syncs are the same work.

    cluster.quickstart_overhead step time on Ray against in-process; at most 1.10

And a weight sync to an engine that cannot read the memory of the sender: copied, sent through gloo on the loopback to
another process, summed up and compared there.

    cluster.broadcast_vs_memcpy bytes/s of that, as a share of the bytes/s of a memcpy of as many bytes in one thread

Prints one JSON line per figure.

    python benchmarks/cluster.py [rollouts] [quickstart] [broadcast]      all of them, or those
    python benchmarks/cluster.py quickstart --steps 3 --rounds 1          in some minutes, where steps take long
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.agent_loop import SingleTurnAgentLoopConfig
from penstock.cluster.launcher import CPUActorLauncher
from penstock.cluster.placement import RayPlacement
from penstock.cluster.session import connect
from penstock.data import PromptSet, Sampler
from penstock.judger import NativeJudgerConfig
from penstock.ports import Completion, Description, GenerateRequest, Local, Placement
from penstock.produce import AgentLoopManager, FailurePolicyConfig, SyncProduceStrategyConfig
from penstock.produce.context import TaskRuntime
from penstock.produce.failures import DeadLetters, FailurePolicy
from penstock.produce.task import Task
from penstock.replay import ReplayBuffer
from penstock.rollout import UNKNOWN_STEP, FinishReason, Prompt, SampleParams
from penstock.testing import CharTokenizer
from penstock.weights.broadcast import WeightServer
from penstock.weights.stored import BroadcastWeights

K, GROUPS = 8, 125
ROUNDS = 8
TOKENS = 64
STEPS, RUNS = 6, 2
"""Of each run of `quickstart`, and how often each of the two is made."""
RUN_TIMEOUT_S = 600.0
MB = 1 << 20
TENSORS, TENSOR_MB = 64, 4
"""What is broadcast."""
SYNCS = 7


class Instant:
    """An engine that answers at once, wherever it is asked."""

    def description(self) -> Description:
        return Description(name="instant", port="engine", build=Instant)

    async def generate(self, request: GenerateRequest) -> Completion:
        ids = bytes([97, 0, 0, 0]) * TOKENS
        return Completion(
            ids=ids, logprobs=bytes(4 * TOKENS), finish_reason=FinishReason.STOP, steps=((UNKNOWN_STEP, TOKENS),)
        )

    async def abort(self, request_ids: list[str]) -> None:
        pass


async def length(response: str, label: Any, extra_info: dict[str, Any]) -> float:
    """On the event loop: a worker process would be what is measured."""
    return float(len(response))


def manager_on(placement: Placement, actors: int) -> AgentLoopManager:
    small: dict[str, Any] = {"num_ray_actors": actors, "num_cpus_per_actor": 0.25, "cpu_memory_per_actor": 200 << 20}
    judger = NativeJudgerConfig(reward_handler=length, max_concurrency=K * GROUPS, **small).build(placement)
    loop = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=TOKENS), **small).build(
        engine=Instant(), tokenizer=CharTokenizer(), judger=judger, placement=placement
    )
    buffer = ReplayBuffer()
    prompts = PromptSet([Prompt(ids=bytes(4 * 32), ground_truth="a") for _ in range(1000)])
    strategy = SyncProduceStrategyConfig()
    runtime = TaskRuntime(
        name="task",
        agent_loop=loop,
        sampler=Sampler(prompts, prompt_repeat_k=K, shuffle=True, seed=0, waiting=buffer),
        buffer=buffer,
        stale_rule=strategy.stale_rule(1),
        is_valid_sample=strategy.is_valid_sample_fn,
        failures=FailurePolicy(FailurePolicyConfig(), DeadLetters()),
    )
    return AgentLoopManager([Task(runtime, strategy.build())], engine=None, buffer=buffer)


async def measure(manager: AgentLoopManager) -> tuple[float, float]:
    """Rollouts per second, and this process's processor seconds per rollout; of the middle round of several."""
    rates, shares = [], []
    for step in range(1, ROUNDS + 2):
        began, used = time.perf_counter(), time.process_time()
        result = await manager.produce_batch(GROUPS, step, model_step=step - 1)
        await manager.commit(step)
        assert len(result.groups) == GROUPS
        if step > 1:  # the first warms up
            rates.append(GROUPS * K / (time.perf_counter() - began))
            shares.append((time.process_time() - used) / (GROUPS * K))
    await manager.close()
    return statistics.median(rates), statistics.median(shares)


def step_seconds(recipe: str, *arguments: str) -> list[float]:
    """Of the steps of a short run, but for the first, which waits for models to be loaded."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        command = [sys.executable, "-m", "penstock.cli", "train", recipe, "--run-dir", f"{directory}/run", *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=RUN_TIMEOUT_S)
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return [step["time/step_s"] for step in steps if "time/step_s" in step][1:]


def quickstart_overhead(steps: int, rounds: int) -> None:
    same = [f"--set=total_steps={steps}", f"--set=cpu_threads={os.cpu_count()}", "--set=evaluator=null"]
    single = ["engines.num_engines=1", "resources.train.num_workers=1"]
    single += [f"manager.tasks.0.{part}.num_ray_actors=1" for part in ("agent_loop_config", "judger_config")]
    here: list[float] = []
    there: list[float] = []
    for _ in range(rounds):
        here += step_seconds("quickstart", *same)
        there += step_seconds("quickstart-ray", "--address", "local", *same, *(f"--set={each}" for each in single))
    mine, ray_s = statistics.median(here), statistics.median(there)
    detail = f"{ray_s:.2f} against {mine:.2f} s a step, the middle of {len(here)}, {os.cpu_count()} threads"
    say("cluster.quickstart_overhead", ray_s / mine, "ratio", detail)


class Blocks:
    """Weights of random numbers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._tensors = {f"block.{n}": torch.randn(TENSOR_MB * MB // 4) for n in range(TENSORS)}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def receive(stored: BroadcastWeights) -> str:
    """In another process."""
    torch.set_num_threads(1)
    with stored.receive() as received:
        assert isinstance(received.checksum, str)
        return received.checksum


def copy_seconds(num_bytes: int) -> float:
    source, target = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
    seconds = []
    for _ in range(SYNCS):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def broadcast_vs_memcpy() -> None:
    source, server, seconds = Blocks(), WeightServer("127.0.0.1", through_memory=False), []
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        for step in range(SYNCS + 1):
            began = time.perf_counter()
            stored = server.write(source, step)
            assert other.submit(receive, stored).result(timeout=RUN_TIMEOUT_S) == stored.checksum
            server.confirm()
            seconds.append(time.perf_counter() - began)
    server.close()
    num_bytes = TENSORS * TENSOR_MB * MB
    sync_s, copy_s = statistics.median(seconds[1:]), copy_seconds(num_bytes)  # the first starts the other process
    rates = f"{num_bytes / sync_s / 1e9:.2f} against {num_bytes / copy_s / 1e9:.2f} GB/s, {num_bytes // MB} MB"
    say("cluster.broadcast_vs_memcpy", copy_s / sync_s, "ratio", rates)


def rollouts() -> None:
    here_rate, here_cpu = asyncio.run(measure(manager_on(Local(), 0)))
    with connect("local", num_cpus=2, object_store_memory=80 << 20) as session:
        placement = RayPlacement(CPUActorLauncher(session))
        there_rate, there_cpu = asyncio.run(measure(manager_on(placement, 2)))
    cores = os.cpu_count()
    rates = f"{there_rate:,.0f} against {here_rate:,.0f} rollouts/s in one process, on {cores} cores"
    say("cluster.rollouts_vs_local", there_rate / here_rate, "ratio", rates)
    cpu = f"{1e6 * there_cpu:.0f} against {1e6 * here_cpu:.0f} us of the driver's processor per rollout"
    say("cluster.driver_share", there_cpu / here_cpu, "ratio", cpu)


def say(figure: str, value: float, unit: str, detail: str) -> None:
    print(json.dumps({"figure": figure, "value": round(value, 4), "unit": unit, "detail": detail}), flush=True)


PARTS = ("rollouts", "quickstart", "broadcast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run of quickstart; the first is not counted")
    parser.add_argument("--rounds", type=int, default=RUNS, help="of runs of quickstart, here and on Ray in turn")
    options = parser.parse_args()
    asked = options.parts or list(PARTS)
    if unknown := [part for part in asked if part not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.steps < 2 or options.rounds < 1:
        parser.error("--steps must be at least 2 and --rounds at least 1")
    if "rollouts" in asked:
        rollouts()
    if "quickstart" in asked:
        quickstart_overhead(options.steps, options.rounds)
    if "broadcast" in asked:
        broadcast_vs_memcpy()


if __name__ == "__main__":
    main()
