"""A manager with scripted parts, in a few lines.

    world = ScriptedWorld([ScriptedTask(name="sums")], batch_size=4)
    result = run_virtual(world.manager.produce_batch(4, 1, model_step=0))
    world.check()

`check` raises when groups or tokens do not add up, or when more is in flight than the bound allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.agent_loop import AgentLoop, SingleTurnAgentLoop
from penstock.data import PromptSet, Sampler
from penstock.engine import RolloutControllerConfig
from penstock.errors import PenstockError
from penstock.events import Observer
from penstock.ports import Engine, TurnLog
from penstock.produce import (
    AgentLoopManager,
    AsyncProduceStrategyConfig,
    FailurePolicyConfig,
    ProduceStrategyConfig,
    SyncProduceStrategyConfig,
)
from penstock.produce.context import TaskRuntime
from penstock.produce.failures import DeadLetters, FailurePolicy
from penstock.produce.pause import PauseDeadlines
from penstock.produce.task import Task
from penstock.replay import GroupState, ReplayBuffer, Storage
from penstock.rollout import Prompt, SampleParams, Status, pack_ids
from penstock.testing.engine import EngineScript, ScriptedEngine
from penstock.testing.history import Findings, History, RecordingStorage, check_history
from penstock.testing.judger import JudgerScript, ScriptedJudger
from penstock.testing.script import Distribution
from penstock.testing.tokenizer import CharTokenizer


class ScriptedTask(msgspec.Struct, kw_only=True):
    name: str = "task"
    weight: float = 1.0
    prompt_repeat_k: int = 2
    prompts: int = 1000
    strategy: ProduceStrategyConfig = msgspec.field(default_factory=SyncProduceStrategyConfig)
    judger: JudgerScript | None = msgspec.field(default_factory=JudgerScript)
    failures: FailurePolicyConfig = msgspec.field(default_factory=FailurePolicyConfig)
    loop: type[AgentLoop] = SingleTurnAgentLoop
    sample_params: SampleParams = msgspec.field(default_factory=SampleParams)
    judge_timeout_s: float = 300.0


class ScriptedWorld:
    """Holds the parts: `manager`, `engine` and the scripted `engines` behind it, `buffer`, `history`, and per task
    `judgers`.
    """

    def __init__(
        self,
        tasks: Sequence[ScriptedTask] | None = None,
        *,
        batch_size: int = 4,
        engine: EngineScript | Engine | None = None,
        num_engines: int = 1,
        controller: RolloutControllerConfig | None = None,
        seed: int = 0,
        sync_weights_interval: int = 1,
        pause_deadlines: PauseDeadlines | None = None,
        stall_timeout_s: float = 900.0,
        flush_s: Distribution | None = None,
        storage: Storage | None = None,
        history: History | None = None,
        dead_letters: Path | None = None,
        observer: Observer | None = None,
        turn_log: TurnLog | None = None,
        manager_class: type[AgentLoopManager] = AgentLoopManager,
    ) -> None:
        """Scripted engines stand behind a `RolloutController`; an `Engine` that is given is the door itself.

        `storage` keeps the groups, in memory unless one is given; `history` is gone on with after a restart.
        """
        self.specs = {task.name: task for task in tasks or [ScriptedTask()]}
        self.batch_size = batch_size
        self.sync_weights_interval = sync_weights_interval
        self.engines: list[ScriptedEngine] = []
        self.engine: Engine
        if isinstance(engine, EngineScript | None):
            script = engine or EngineScript()
            self.engines = [ScriptedEngine(script, seed=seed + n) for n in range(num_engines)]
            named = {f"engine-{n}": scripted for n, scripted in enumerate(self.engines)}
            self.engine = (controller or RolloutControllerConfig()).build(named, max_running=script.slots)
        else:
            self.engine = engine
        recording = RecordingStorage(storage, history=history, flush_s=flush_s, seed=seed)
        self.history = recording.history
        self.buffer = ReplayBuffer(storage=recording)
        self.turn_log = turn_log
        self.judgers: dict[str, ScriptedJudger] = {}
        self.rules = {name: task.strategy.stale_rule(sync_weights_interval) for name, task in self.specs.items()}
        self._sizes: list[dict[str, int]] = []
        self.dead_letters = DeadLetters(dead_letters)
        self.manager = manager_class(
            [self._task(task, seed) for task in self.specs.values()],
            engine=self.engine,
            buffer=self.buffer,
            pause_deadlines=pause_deadlines,
            stall_timeout_s=stall_timeout_s,
            observer=observer,
        )

    async def close(self) -> None:
        """The manager's agent loops and the engines; nothing is left running."""
        await self.manager.close()
        await self.engine.close()

    async def load_weights(self, model_step: int) -> None:
        await self.engine.load_weights(_NoWeights(), model_step)

    async def sync_weights(self, model_step: int) -> None:
        """As the disaggregated trainer does it."""
        await self.manager.pause_produce()
        await self.load_weights(model_step)
        await self.manager.continue_produce(model_step)

    def check(self) -> None:
        """Raises when groups or tokens were lost or invented."""
        for name in self.specs:
            self.buffer.conservation(name).check()
        self.buffer.tokens.check()

    def check_bound(self) -> None:
        """Raises when a task has more groups running and completed than the disaggregated bound allows."""
        for name in self.specs:
            held = self.buffer.state_count(name, GroupState.RUNNING) + self.buffer.count(name, Status.COMPLETED)
            if held > (bound := self.bound(name)):
                raise PenstockError(f"task {name!r} has {held} groups running and completed; the bound is {bound}")

    def bound(self, task: str) -> int:
        """The batches that the engines' weights may serve from the consumer's step on, and the over-sample budget."""
        first = self.manager.progress.next_consumer_step
        last = self.manager.model_step + self.rules[task].stale_threshold
        while len(self._sizes) < last:
            self._sizes.append(self.manager.get_task_batch_sizes(self.batch_size, len(self._sizes) + 1))
        sizes = [step_sizes[task] for step_sizes in self._sizes[:last]]
        strategy = self.specs[task].strategy
        share = strategy.over_sample_threshold if isinstance(strategy, AsyncProduceStrategyConfig) else 0.0
        # What was over-sampled for an earlier, larger step may still be there.
        return sum(sizes[first - 1 :]) + math.ceil(share * max(sizes, default=0))

    def findings(self) -> Findings:
        """What the history checker says, with everything this world knows."""
        return check_history(
            self.history,
            rules=self.rules,
            held={event.transition.group_id for event in self.history.events if self._holds(event.transition.group_id)},
            conservation={name: self.buffer.conservation(name) for name in self.specs},
        )

    def _holds(self, group_id: str) -> bool:
        try:
            return bool(self.buffer.story(group_id))
        except KeyError:
            return False

    def _task(self, spec: ScriptedTask, seed: int) -> Task:
        tokenizer = CharTokenizer()
        judger = ScriptedJudger(spec.judger, seed=seed) if spec.judger is not None else None
        if judger is not None:
            self.judgers[spec.name] = judger
        runtime = TaskRuntime(
            name=spec.name,
            agent_loop=spec.loop(
                engine=self.engine,
                tokenizer=tokenizer,
                judger=judger,
                sample_params=spec.sample_params,
                run_seed=seed,
                judge_timeout_s=spec.judge_timeout_s,
                turn_log=self.turn_log,
            ),
            sampler=Sampler(
                PromptSet(_prompts(spec.prompts)),
                prompt_repeat_k=spec.prompt_repeat_k,
                shuffle=False,
                seed=seed,
                waiting=self.buffer,
            ),
            buffer=self.buffer,
            stale_rule=spec.strategy.stale_rule(self.sync_weights_interval),
            is_valid_sample=spec.strategy.is_valid_sample_fn,
            failures=FailurePolicy(spec.failures, self.dead_letters),
            replayable=spec.loop.replayable,
        )
        strategy = spec.strategy.build(sync_weights_interval=self.sync_weights_interval)
        return Task(runtime, strategy, spec.weight)


class _NoWeights:
    """Kept, so that an engine that comes back is given them too."""

    checksum = ""

    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield from ()


def _prompts(n: int) -> list[Prompt]:
    return [
        Prompt(messages=({"role": "user", "content": str(i)},), ids=pack_ids([1, i + 2]), ground_truth=str(i))
        for i in range(n)
    ]
