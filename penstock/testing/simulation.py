"""Whole runs in virtual time, drawn from a seed: tasks, strategies, speeds, faults, pauses and refused steps.

    python -m penstock.testing.simulation 1234      replay one seed and print its history

Between any two turns of the event loop groups and tokens must add up and, disaggregated, what is in flight must keep
to its bound; what is consumed must be whole and fresh; at the end the history is checked. The loops are the trainers'
own, over scripted ports.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import random
from collections.abc import Callable
from typing import Any, cast

import msgspec

from penstock.engine import RolloutControllerConfig
from penstock.errors import PenstockError, StepRefused
from penstock.events import Nobody
from penstock.ports import Published
from penstock.produce import (
    AsyncProduceStrategyConfig,
    FailurePolicyConfig,
    IsValidSampleFn,
    ProduceBatchResult,
    ProduceStrategyConfig,
    SyncProduceStrategyConfig,
    default_is_valid_sample_fn,
)
from penstock.produce.pause import PauseDeadlines
from penstock.replay import Storage
from penstock.rollout import RolloutState, Status
from penstock.testing.clock import run_virtual
from penstock.testing.engine import EngineFaults, EngineScript
from penstock.testing.history import History
from penstock.testing.judger import JudgerScript
from penstock.testing.script import Distribution, constant, long_tail, uniform
from penstock.testing.world import ScriptedTask, ScriptedWorld
from penstock.trainer.loops import (
    MAX_REFUSED_IN_A_ROW,
    LoopPorts,
    Producer,
    Schedule,
    Stages,
    colocated_loop,
    disaggregated_loop,
)

VIRTUAL_DEADLINE_S = 1e6


class SimulationError(PenstockError):
    """A seed that failed, with the command that replays it."""


class Scenario(msgspec.Struct, kw_only=True):
    """Everything that a seed decides."""

    seed: int
    disaggregated: bool
    tasks: list[ScriptedTask]
    batch_size: int
    train_steps: int
    sync_weights_interval: int
    engine: EngineScript
    train_s: Distribution
    refused: float
    """Share of train steps that are refused."""
    disturbed: float
    """Share of waits for a batch during which production is paused and continued."""
    flush_s: Distribution | None
    eval_interval: int
    eval_s: Distribution


def simulate(seed: int) -> History:
    """Run one seed. Raises SimulationError with what went wrong and how to see it again."""
    return run_scenario(draw_scenario(seed))


def run_scenario(scenario: Scenario) -> History:
    seed = scenario.seed
    world = build_world(scenario)
    run = Run(scenario, world)
    try:
        run_virtual(run.main(), seed=seed, deadline=VIRTUAL_DEADLINE_S, after_turn=run.after_turn)
        world.findings().require_none()
    except Exception as error:
        raise SimulationError(
            f"seed {seed}: {type(error).__name__}: {error}\n"
            f"replay it with: python -m penstock.testing.simulation {seed}"
        ) from error
    return world.history


def build_world(scenario: Scenario, *, storage: Storage | None = None, history: History | None = None) -> ScriptedWorld:
    return ScriptedWorld(
        scenario.tasks,
        batch_size=scenario.batch_size,
        engine=scenario.engine,
        num_engines=2,
        # Patient: what is shown is that a run in such a world goes on, not when it gives up.
        controller=RolloutControllerConfig(probe_interval_s=20.0, start_timeout_s=30.0, unavailable_timeout_s=10_000.0),
        seed=scenario.seed,
        sync_weights_interval=scenario.sync_weights_interval,
        pause_deadlines=PauseDeadlines(request_timeout_s=10.0, resend_interval_s=5.0),
        stall_timeout_s=20_000.0,
        flush_s=scenario.flush_s,
        storage=storage,
        history=history,
    )


def simulate_many(seeds: range) -> list[str]:
    """Run these seeds; one text per bad one. Plain numbers in and out, so that processes can share the work."""
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    problems = []
    for seed in seeds:
        try:
            simulate(seed)
        except SimulationError as error:
            problems.append(str(error))
    return problems


class Run:
    """One loop over the ports of a world, from the beginning or from a checkpoint.

    Learns nothing: a train step takes its time, and is refused as often as the scenario says, never so often in a row
    that the run would stop.
    """

    def __init__(self, scenario: Scenario, world: ScriptedWorld, checkpoint_step: int = 0) -> None:
        self.scenario = scenario
        self.world = world
        self.checkpoint_step = checkpoint_step
        self.checkpoint_interval = scenario.train_steps
        self.manager = world.manager
        self.random = random.Random(f"consumer {scenario.seed}")
        self._refused_in_a_row = 0
        self._published = checkpoint_step
        self._checked = 0

    async def main(self) -> None:
        await self.loop()
        await self.manager.shutdown()
        await self.world.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            raise PenstockError(f"left running after shutdown: {sorted(task.get_name() for task in others)}")

    async def loop(self) -> None:
        loop = disaggregated_loop if self.scenario.disaggregated else colocated_loop
        await loop(self._schedule(), self._ports(), begin=self.checkpoint_step)

    def after_turn(self) -> None:
        if self.has_news():
            self.world.check()
            if self.scenario.disaggregated:
                self.world.check_bound()

    def has_news(self) -> bool:
        """Whether there were events since this was last asked."""
        before, self._checked = self._checked, len(self.world.history.events)
        return self._checked != before

    def _schedule(self) -> Schedule:
        return Schedule(
            total_steps=self.scenario.train_steps,
            batch_size=self.scenario.batch_size,
            sync_weights_interval=self.scenario.sync_weights_interval,
            eval_interval=self.scenario.eval_interval,
            checkpoint_interval=self.checkpoint_interval,
        )

    def _ports(self) -> LoopPorts:
        producer = cast(Producer, _Disturbed(self)) if self.scenario.disaggregated else self.manager
        return LoopPorts(
            producer=producer,
            learner=self,
            channel=self,
            checkpointer=self,
            evaluator=self,
            observer=Nobody(),
            gauges=_no_gauges,
            stop=lambda: False,
        )

    # The learner.

    async def learn(self, result: ProduceBatchResult, train_step: int, stages: Stages) -> dict[str, float]:
        if not self.scenario.disaggregated:
            self.require_none_pending()
        self._require_whole(result, train_step)
        with stages("train"):
            await asyncio.sleep(max(0.0, self.scenario.train_s(self.random)))
        refused = self.random.random() < self.scenario.refused and self._refused_in_a_row + 1 < MAX_REFUSED_IN_A_ROW
        self._refused_in_a_row = self._refused_in_a_row + 1 if refused else 0
        self.world.history.consumed(train_step, result.groups, trained=not refused)
        if refused:
            raise StepRefused("as the scenario wants it")
        return {}

    async def committed(self, train_step: int) -> None:
        """Nothing is kept beside the history."""

    # The weight channel.

    async def publish(self, model_step: int) -> Published:
        self.require_none_pending()
        await self.world.load_weights(model_step)
        self._published = model_step
        return Published(model_step=model_step, num_bytes=0, seconds=0.0)

    async def close(self) -> None:
        """Nothing is held."""

    # The checkpointer.

    async def keep(self, train_step: int, metrics: dict[str, float], *, checkpoint: bool, export: bool) -> None:
        """Nothing dies here; see `crashes`."""

    def check(self) -> None:
        """Nothing fails."""

    # The evaluator.

    async def evaluate(self, model_step: int) -> None:
        """Takes its time, in which the weights must stay what they are."""
        for seconds in (0.0, max(0.0, self.scenario.eval_s(self.random))):
            await asyncio.sleep(seconds)
            if self._published != model_step:
                raise PenstockError(f"the evaluation of {model_step} met the weights {self._published}")

    def newest_weights(self) -> int:
        """The last that can have made a token."""
        return self.manager.model_step

    def require_none_pending(self) -> None:
        for task in self.manager.tasks.values():
            if task.strategy.pending_task_count():
                raise PenstockError(f"task {task.name!r} has pending groups after a pause")

    def _require_whole(self, result: ProduceBatchResult, train_step: int) -> None:
        if len(result.groups) != self.scenario.batch_size:
            raise PenstockError(f"step {train_step}: {len(result.groups)} groups, not {self.scenario.batch_size}")
        for rollout in (rollout for group in result.groups for rollout in group):
            judged = rollout.reward is not None and math.isfinite(rollout.reward.score)
            newest = max((step for step, _ in rollout.steps), default=0)
            if rollout.status is not Status.COMPLETED or not judged or newest > self.newest_weights():
                raise PenstockError(
                    f"step {train_step}: consumed {rollout.rollout_id}, {rollout.status}, {rollout.reward}, "
                    f"tokens of {rollout.steps}, weights {self.manager.model_step}"
                )


class _Disturbed:
    """The manager, sometimes paused and continued while the consumer waits for a batch."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.manager, name)

    async def get_batch(self, batch_size: int, train_step: int) -> ProduceBatchResult:
        run = self._run
        disturbance = None
        if run.random.random() < run.scenario.disturbed:
            disturbance = asyncio.create_task(self._disturb(), name="disturbance")
        result = await run.manager.get_batch(batch_size, train_step)
        if disturbance is not None:
            await disturbance
        return result

    async def _disturb(self) -> None:
        run = self._run
        await asyncio.sleep(run.random.uniform(0, 20))
        await run.manager.pause_produce()
        run.require_none_pending()
        await asyncio.sleep(run.random.choice([0, 5]))
        await run.manager.continue_produce(run.manager.model_step)


async def _no_gauges() -> dict[str, float]:
    return {}


def draw_scenario(seed: int) -> Scenario:
    rng = random.Random(f"scenario {seed}")
    evaluation = random.Random(f"evaluation {seed}")
    disaggregated = rng.random() < 0.65
    return Scenario(
        seed=seed,
        disaggregated=disaggregated,
        tasks=[_draw_task(rng, f"task{i}", disaggregated) for i in range(rng.choice([1, 1, 2, 3]))],
        batch_size=rng.randint(1, 5),
        train_steps=rng.randint(3, 7),
        sync_weights_interval=rng.randint(1, 3),
        engine=EngineScript(
            slots=rng.choice([3, 8, 1000]),
            tokens_per_s=10.0,
            length=rng.choice([uniform(1, 80), long_tail(30, 400), constant(20)]),
            latency_s=rng.choice([constant(0), uniform(0, 3)]),
            pause_s=rng.choice([0.0, 0.0, 1.0]),
            faults=_draw_faults(rng),
        ),
        train_s=rng.choice([constant(0), uniform(0, 3), uniform(0, 30)]),
        refused=rng.choice([0.0, 0.1, 0.4]),
        disturbed=rng.choice([0.0, 0.3, 0.8]) if disaggregated else 0.0,
        flush_s=rng.choice([None, constant(0), uniform(0, 0.5)]),
        eval_interval=evaluation.choice([1, 2, 10]),
        eval_s=evaluation.choice([constant(0), uniform(0, 20)]),
    )


def _draw_faults(rng: random.Random) -> EngineFaults:
    if rng.random() < 0.4:
        return EngineFaults()
    share: Callable[[float], float] = lambda most: rng.choice([0.0, rng.uniform(0, most)])  # noqa: E731
    return EngineFaults(
        fails=share(0.2),
        hangs=share(0.03),
        slow=share(0.05),
        nonsense=share(0.1),
        wrong_version=share(0.1),
        pause_fails=share(0.5),
        pause_hangs=share(0.2),
    )


def _draw_task(rng: random.Random, name: str, disaggregated: bool) -> ScriptedTask:
    judger = JudgerScript(relative=rng.random() < 0.15)
    if rng.random() < 0.5:
        judger = JudgerScript(
            latency_s=rng.choice([constant(0), uniform(0, 4)]),
            unjudged=rng.choice([0.0, 0.1]),
            not_finite=rng.choice([0.0, 0.05]),
            raises=rng.choice([0.0, 0.05]),
            hangs=rng.choice([0.0, 0.02]),
            relative=judger.relative,
        )
    prompt_repeat_k = rng.randint(1, 3)
    return ScriptedTask(
        name=name,
        weight=rng.choice([1.0, 1.0, 2.0, 0.3, 0.05]),
        prompt_repeat_k=prompt_repeat_k,
        prompts=rng.choice([3, 50]),
        strategy=_draw_strategy(rng, disaggregated),
        judger=judger,
        failures=FailurePolicyConfig(
            breaker_window=10_000,
            max_filtered_in_a_row=10_000,
            backoff_s=rng.choice([0.0, 0.5]),
            min_group_size=rng.choice([None, None, 1]),
        ),
        judge_timeout_s=30.0,
    )


def _draw_strategy(rng: random.Random, disaggregated: bool) -> ProduceStrategyConfig:
    is_valid = rng.choice([default_is_valid_sample_fn, default_is_valid_sample_fn, _mostly_valid])
    pause_timeout_s = rng.choice([3.0, 60.0])
    if not disaggregated and rng.random() < 0.3:
        return SyncProduceStrategyConfig(is_valid_sample_fn=is_valid, pause_timeout_s=pause_timeout_s)
    return _draw_async(rng, is_valid, pause_timeout_s)


def _draw_async(rng: random.Random, is_valid: IsValidSampleFn, pause_timeout_s: float) -> AsyncProduceStrategyConfig:
    partial = rng.random() < 0.5
    trigger = rng.choice([-1, 0, 1, 3])
    config = AsyncProduceStrategyConfig(
        is_valid_sample_fn=is_valid,
        pause_timeout_s=pause_timeout_s,
        over_sample_threshold=rng.choice([0.0, 0.5, 2.0]),
        enable_partial_rollout=partial,
        max_staleness=rng.randint(0, 3),
        max_token_staleness=rng.choice([None, None, 0, 1]),
        tail_batch_trigger_size=trigger,
        tail_batch_max_tries=rng.choice([None, 1, 2]) if trigger > 0 and not partial else None,
    )
    config.check()
    return config


def _mostly_valid(samples: list[RolloutState]) -> bool:
    return samples[0].draw % 4 != 3


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay one simulated run.")
    parser.add_argument("seed", type=int)
    seed = parser.parse_args().seed
    print(draw_scenario(seed))
    for event in simulate(seed).events:
        move = event.transition
        print(f"step {move.train_step:3} {move.group_id:12} {move.source} -> {move.target} {move.reason or ''}")


if __name__ == "__main__":
    main()
