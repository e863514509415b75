"""What the producer costs: sampler, strategy, buffer and take, with an agent loop that takes no time.

Groups of 8 with 64-token answers, n of them in flight at once, beside bare asyncio doing the least it could for the
same work: a task, a callback and 8 records a group. Nothing here waits, so what is measured is the processor's time.
Prints one JSON line per figure.

python benchmarks/pipeline.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Callable

from penstock.data import PromptSet, Sampler
from penstock.produce import AgentLoopManager, FailurePolicyConfig, SyncProduceStrategyConfig
from penstock.produce.context import TaskRuntime
from penstock.produce.failures import DeadLetters, FailurePolicy
from penstock.produce.task import Task
from penstock.replay import ReplayBuffer
from penstock.rollout import FinishReason, Group, Prompt, RolloutState, Status, Tokens, Verdict, linear

K = 8
ANSWER = linear(Tokens().append(range(64), [0.0] * 64, model_step=0))
VERDICT = Verdict(1.0)


class Instant:
    """An agent loop that answers at once."""

    async def generate_group(self, group: Group, *, enable_partial_rollout: bool) -> Group:
        for rollout in group:
            _answer(rollout)
        return group

    async def pause(self) -> None:
        pass

    async def stages(self) -> dict[str, str]:
        return {}

    async def close(self) -> None:
        pass


def _answer(rollout: RolloutState) -> None:
    rollout.segments = ANSWER
    rollout.finish_reason = FinishReason.STOP
    rollout.reward = VERDICT
    rollout.status = Status.COMPLETED


def manager_for(loop: Instant, k: int) -> tuple[AgentLoopManager, ReplayBuffer]:
    buffer = ReplayBuffer()
    prompts = PromptSet([Prompt(ids=bytes(4 * 32)) for _ in range(1000)])
    strategy = SyncProduceStrategyConfig()
    runtime = TaskRuntime(
        name="task",
        agent_loop=loop,
        sampler=Sampler(prompts, prompt_repeat_k=k, shuffle=True, seed=0, waiting=buffer),
        buffer=buffer,
        stale_rule=strategy.stale_rule(1),
        is_valid_sample=strategy.is_valid_sample_fn,
        failures=FailurePolicy(FailurePolicyConfig(), DeadLetters()),
    )
    return AgentLoopManager([Task(runtime, strategy.build())], engine=None, buffer=buffer), buffer


async def ours(n: int) -> float:
    """Seconds to produce and take n groups."""
    manager, buffer = manager_for(Instant(), K)
    started = time.process_time()
    result = await manager.produce_batch(n, 1, model_step=0)
    await manager.commit(1)
    seconds = time.process_time() - started
    assert len(result.groups) == n
    buffer.conservation().check()
    return seconds


async def bare(n: int) -> float:
    """The same number of groups as tasks that make 8 records each."""
    prompt = Prompt(ids=bytes(4 * 32))
    done: list[Group] = []

    async def play(draw: int) -> Group:
        group_id = f"task:{draw}"
        group = [
            RolloutState(prompt=prompt, task_name="task", group_id=group_id, rollout_id=f"{group_id}:{k}", draw=draw)
            for k in range(K)
        ]
        for rollout in group:
            _answer(rollout)
        return group

    def ended(task: asyncio.Task[Group]) -> None:
        done.append(task.result())
        if len(done) == n:
            finished.set()

    finished = asyncio.Event()
    started = time.process_time()
    tasks = [asyncio.create_task(play(draw)) for draw in range(n)]
    for task in tasks:
        task.add_done_callback(ended)
    await finished.wait()
    return time.process_time() - started


def per_group(measure: Callable[[int], object], n: int, repeats: int) -> float:
    """Median seconds a group."""
    seconds = []
    for _ in range(repeats):
        gc.collect()
        seconds.append(asyncio.run(measure(n)) / n)  # type: ignore[arg-type]
    return statistics.median(seconds)


async def lookups(n: int) -> dict[str, float]:
    """Microseconds of count, and of put and take a group, with n groups of one rollout held."""
    buffer = ReplayBuffer()
    prompt = Prompt()
    rule = {"model_step": 0, "current_train_step": 1, "stale_threshold": 10}
    started = time.perf_counter()
    for draw in range(n):
        rollout = RolloutState(prompt=prompt, task_name="task", group_id=f"task:{draw}", rollout_id="", draw=draw)
        _answer(rollout)
        buffer.draw([rollout], draw + 1)
        buffer.put([rollout], "task", **rule)
    put = (time.perf_counter() - started) / n
    started = time.perf_counter()
    for _ in range(10_000):
        buffer.count("task", Status.COMPLETED)
    count = (time.perf_counter() - started) / 10_000
    taken = min(n, 5000) // 5
    seconds = []
    for step in range(1, 6):
        started = time.perf_counter()
        buffer.take_batch({"task": taken}, train_step=step)
        seconds.append((time.perf_counter() - started) / taken)
    return {"count_us": count * 1e6, "draw_put_us": put * 1e6, "take_us": statistics.median(seconds) * 1e6}


async def loop_lag(n: int) -> float:
    """99th percentile, in milliseconds, of how late a 1 ms timer fires while n rollouts are played."""

    class Slow(Instant):
        async def generate_group(self, group: Group, *, enable_partial_rollout: bool) -> Group:
            await asyncio.sleep(0.2 + (group[0].draw * 2654435761 % 2000) / 1000)
            return await super().generate_group(group, enable_partial_rollout=enable_partial_rollout)

    manager, _ = manager_for(Slow(), K)
    lags: list[float] = []

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - before - 0.001)

    # Production begins with one long turn that starts everything; what counts is the time while it runs.
    producing = asyncio.create_task(manager.produce_batch(n // K, 1, model_step=0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    watching = asyncio.create_task(watch())
    await producing
    watching.cancel()
    return statistics.quantiles(lags, n=100)[98] * 1e3


def show(figure: str, value: float, unit: str, **detail: object) -> None:
    print(json.dumps({"figure": figure, "value": round(value, 3), "unit": unit, "detail": detail}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: a third of the rounds")
    quick = parser.parse_args().quick
    asyncio.run(ours(500))
    asyncio.run(bare(500))
    rounds = 3 if quick else 7
    here, floor = per_group(ours, 4096, rounds), per_group(bare, 4096, rounds)
    micro = {"ours_us": round(here * 1e6, 2), "bare_us": round(floor * 1e6, 2)}
    show("pipeline.groups_per_s", 1 / here, "groups/s", n=4096, k=K, tokens=64, **micro)
    show("pipeline.vs_bare_asyncio", here / floor, "x", n=4096, **micro)
    large_n = 20_000 if quick else 100_000
    growth = {
        name: per_group(measure, large_n, 1 if quick else 3) / per_group(measure, 1000, 2 * rounds + 1)
        for name, measure in (("ours", ours), ("bare", bare))
    }
    show("pipeline.growth_vs_bare_asyncio", growth["ours"] / growth["bare"], "x", n=[1000, large_n], **growth)
    small, large = asyncio.run(lookups(1000)), asyncio.run(lookups(1_000_000))
    show("pipeline.count_us_at_1m", large["count_us"], "us", at_1k=small, at_1m=large)
    show("pipeline.loop_lag_p99_ms_at_10k", asyncio.run(loop_lag(10_000)), "ms", rollouts=10_000)


if __name__ == "__main__":
    main()
