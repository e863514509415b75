"""What overlapping buys: steps/s of synchronous and asynchronous production, on a virtual clock.

The real loops, strategies, manager and buffer play against an engine that makes tokens at a constant rate per slot:
32 groups of 8 a step, 64 slots, log-normal lengths with p99/p50 = 8, a train step as long as the mean generation of a
step, a weight sync of 2 % of it, interval 1, `max_staleness` 4. The bound is the slower of generation and training,
working all the time. Prints one JSON line per figure, and one per variant with waste, staleness and length bias.

python benchmarks/async.py [--steps 60]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics

import msgspec

from penstock.engine import RolloutControllerConfig
from penstock.events import Nobody
from penstock.ports import Published
from penstock.produce import (
    AsyncProduceStrategyConfig,
    ProduceBatchResult,
    ProduceStrategyConfig,
    SyncProduceStrategyConfig,
)
from penstock.replay import group_staleness
from penstock.rollout import SampleParams
from penstock.testing import EngineScript, ScriptedTask, ScriptedWorld, run_virtual
from penstock.trainer.loops import LoopPorts, Schedule, Stages, colocated_loop, disaggregated_loop

GROUPS, K, SLOTS, WARM_UP = 32, 8, 64, 10
TOKENS_PER_S = 50.0
MEDIAN = 200.0
SIGMA = math.log(8.0) / 2.3263
"""p99 is 8 times the median."""
MEAN = MEDIAN * math.exp(SIGMA**2 / 2)
GENERATION_S = GROUPS * K * MEAN / (SLOTS * TOKENS_PER_S)
"""Mean time of a step's generation when every slot is busy."""
TRAIN_S = GENERATION_S
SYNC_S = 0.02 * TRAIN_S
BOUND_S = max(GENERATION_S, TRAIN_S)

VARIANTS: dict[str, ProduceStrategyConfig] = {
    "sync": SyncProduceStrategyConfig(),
    "async": AsyncProduceStrategyConfig(max_staleness=4, tail_batch_trigger_size=0),
    "async + partial": AsyncProduceStrategyConfig(
        max_staleness=4, enable_partial_rollout=True, tail_batch_trigger_size=0, over_sample_threshold=1.0
    ),
    "async + tail batch": AsyncProduceStrategyConfig(
        max_staleness=4, tail_batch_trigger_size=16, tail_batch_max_tries=3, over_sample_threshold=0.5
    ),
}


class Lap(msgspec.Struct):
    """What one consumed batch was."""

    ended_at: float
    staleness: float
    tokens: float


def length(rng: random.Random) -> float:
    return max(1.0, rng.lognormvariate(math.log(MEDIAN), SIGMA))


def world_for(strategy: ProduceStrategyConfig) -> ScriptedWorld:
    task = ScriptedTask(
        name="task",
        prompt_repeat_k=K,
        strategy=strategy,
        sample_params=SampleParams(max_tokens=1 << 20),
        judge_timeout_s=1e9,
    )
    script = EngineScript(slots=SLOTS, tokens_per_s=TOKENS_PER_S, length=length)
    patient = RolloutControllerConfig(request_timeout_s=1e9)
    return ScriptedWorld([task], batch_size=GROUPS, engine=script, controller=patient, stall_timeout_s=1e9)


class Ports:
    """The loop's ports: learning and a weight sync take their time and nothing else."""

    def __init__(self, world: ScriptedWorld) -> None:
        self._world = world
        self.laps: list[Lap] = []

    async def learn(self, result: ProduceBatchResult, train_step: int, stages: Stages) -> dict[str, float]:
        lengths = [rollout.num_tokens for group in result.groups for rollout in group]
        staleness = [group_staleness(group, train_step) for group in result.groups]
        await asyncio.sleep(TRAIN_S)
        now = asyncio.get_running_loop().time()
        self.laps.append(Lap(now, statistics.fmean(staleness), statistics.fmean(lengths)))
        return {}

    async def committed(self, train_step: int) -> None:
        pass

    async def publish(self, model_step: int) -> Published:
        await asyncio.sleep(SYNC_S)
        await self._world.load_weights(model_step)
        return Published(model_step=model_step, num_bytes=0, seconds=SYNC_S)

    async def close(self) -> None:
        pass

    async def keep(self, train_step: int, metrics: dict[str, float], *, checkpoint: bool, export: bool) -> None:
        pass

    def check(self) -> None:
        pass

    async def gauges(self) -> dict[str, float]:
        return {}


async def run(world: ScriptedWorld, steps: int, *, colocated: bool) -> list[Lap]:
    """The trainers' own loop."""
    ports = Ports(world)
    loop = colocated_loop if colocated else disaggregated_loop
    await loop(
        Schedule(total_steps=steps, batch_size=GROUPS, checkpoint_interval=steps),
        LoopPorts(
            producer=world.manager,
            learner=ports,
            channel=ports,
            checkpointer=ports,
            evaluator=None,
            observer=Nobody(),
            gauges=ports.gauges,
            stop=lambda: False,
        ),
    )
    await world.manager.shutdown()
    return ports.laps


def measure(strategy: ProduceStrategyConfig, steps: int) -> dict[str, float]:
    world = world_for(strategy)
    laps = run_virtual(run(world, steps, colocated=isinstance(strategy, SyncProduceStrategyConfig)))
    world.check()
    seconds = laps[-1].ended_at - laps[WARM_UP - 1].ended_at
    tokens = world.buffer.tokens
    return {
        "steps_per_s": (len(laps) - WARM_UP) / seconds,
        "share_of_bound": (len(laps) - WARM_UP) / seconds * BOUND_S,
        "wasted_share": sum(tokens.wasted.values()) / tokens.generated,
        "staleness_mean": statistics.fmean(each.staleness for each in laps[WARM_UP:]),
        "length_bias": statistics.fmean(each.tokens for each in laps[WARM_UP:]) / MEAN,
    }


def show(figure: str, value: float, unit: str, detail: object) -> None:
    print(json.dumps({"figure": figure, "value": round(value, 3), "unit": unit, "detail": detail}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=60, help=f"train steps of each variant, the first {WARM_UP} uncounted"
    )
    steps = parser.parse_args().steps
    measured = {name: measure(strategy, steps) for name, strategy in VARIANTS.items()}
    for name, values in measured.items():
        rounded = {key: round(value, 4) for key, value in values.items()}
        show(f"async.steps_per_s.{name.replace(' + ', '_').replace(' ', '_')}", values["steps_per_s"], "1/s", rounded)
    show("async.bound_steps_per_s", 1 / BOUND_S, "1/s", {"generation_s": GENERATION_S, "train_s": TRAIN_S})
    sync = measured["sync"]["steps_per_s"]
    partial, tail = measured["async + partial"], measured["async + tail batch"]
    show("async.partial_vs_sync", partial["steps_per_s"] / sync, "x", {"at_least": 3.0})
    show("async.partial_share_of_bound", partial["share_of_bound"], "x", {"at_least": 0.9})
    show("async.tail_vs_sync", tail["steps_per_s"] / sync, "x", {})


if __name__ == "__main__":
    main()
