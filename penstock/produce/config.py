"""The configuration of tasks and of the manager that owns them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pydantic

from penstock.agent_loop import AgentLoopConfig
from penstock.config import Config
from penstock.data import PromptSet, SamplerConfig
from penstock.errors import ConfigError, DatasetError
from penstock.events import Nobody, Observer
from penstock.judger import JudgerConfig, JudgerSet, as_judger_config
from penstock.ports import Engine, OnPause, Placement, Tokenizer, TurnLog
from penstock.produce.context import TaskRuntime
from penstock.produce.failures import DeadLetters, FailurePolicy, FailurePolicyConfig
from penstock.produce.manager import AgentLoopManager
from penstock.produce.pause import PauseDeadlines
from penstock.produce.strategy import ProduceStrategyConfig
from penstock.produce.sync_strategy import SyncProduceStrategyConfig
from penstock.produce.task import Task
from penstock.replay import ReplayBuffer


def _checked_judger(value: Any) -> Any:
    """Kept as it was written; refused when it means nothing. pydantic itself would try to build the abstract class."""
    try:
        as_judger_config(value)
    except ConfigError as error:
        raise ValueError("; ".join(error.problems)) from None
    return dict(value) if isinstance(value, Mapping) else value


JudgerChoice = Annotated[
    JudgerConfig | Callable[..., Any] | str | Mapping[str, JudgerConfig | Callable[..., Any] | str] | None,
    pydantic.PlainValidator(_checked_judger),
]


class TaskSpecConfig(Config):
    """A named source of prompts with its own loop, judger, strategy and weight."""

    task_name: str = pydantic.Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    """In metrics, group ids and the ledger."""
    weight: float = pydantic.Field(default=1.0, ge=0, allow_inf_nan=False)
    """Its share of the batch, relative to the other tasks'."""
    sampler_config: SamplerConfig
    """Which prompts, and how often each."""
    agent_loop_config: AgentLoopConfig
    """What plays them."""
    judger_config: JudgerChoice = None
    """A JudgerConfig, a reward function or its name (`package.module.name`, `file.py:name`), a mapping from data source
    to any of these, or None when the loop judges itself."""
    produce_strategy_config: ProduceStrategyConfig = SyncProduceStrategyConfig()
    """How much is in flight, and how stale it may be."""

    @property
    def judger(self) -> JudgerConfig | None:
        return as_judger_config(self.judger_config)


class World(msgspec.Struct, kw_only=True):
    """What the tasks of a run are built from."""

    engine: Engine
    tokenizer: Tokenizer
    judgers: JudgerSet
    buffer: ReplayBuffer
    prompts: dict[str, PromptSet]
    """By task, as `load_prompts` made them."""
    run_seed: int = 0
    sync_weights_interval: int = 1
    dead_letters: Path | None = None
    observer: Observer = msgspec.field(default_factory=Nobody)
    turn_log: TurnLog | None = None
    """Where finished turns of rollouts that are still played are kept, of tasks with partial rollout."""
    context: int = 0
    """The model's limit for a conversation with its answer; 0 where it is not known."""
    pauses_engine: bool = True
    """False when another manager pauses the engine and this one only shares it."""
    namespace: str = ""
    """Tells this manager's requests from another's on the same engine."""
    on_pause: OnPause = "abort"
    """What a pause of the engine does to this manager's requests."""
    placement: Placement | None = None


class AgentLoopManagerConfig(Config):
    """The tasks of a run, and how production pauses, fails and gives up."""

    tasks: TaskSpecConfig | list[TaskSpecConfig]
    """What is trained on."""
    failures: FailurePolicyConfig = FailurePolicyConfig()
    """How often what failed is tried again, and when the run gives up."""
    pause_request_timeout_s: float = pydantic.Field(default=30.0, gt=0, allow_inf_nan=False)
    """For the engines to take a pause."""
    pause_resend_interval_s: float = pydantic.Field(default=5.0, ge=0, allow_inf_nan=False)
    """0: the pause is sent once."""
    stall_timeout_s: float = pydantic.Field(default=900.0, gt=0, allow_inf_nan=False)
    """The run stops when no group finishes for this long."""

    @property
    def task_list(self) -> list[TaskSpecConfig]:
        return [self.tasks] if isinstance(self.tasks, TaskSpecConfig) else self.tasks

    def problems(self) -> Iterator[str]:
        names = [task.task_name for task in self.task_list]
        if not names:
            yield "there is no task; it needs at least 1"
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"task_name {name!r} is used {names.count(name)} times; names must differ"
        if names and not any(task.weight for task in self.task_list):
            yield f"all weights are 0 (tasks {names}); at least one must be above 0"
        for task in self.task_list:
            yield from _task_problems(task, self.failures)

    def build(self, world: World, manager: type[AgentLoopManager] = AgentLoopManager) -> AgentLoopManager:
        """`manager` may be a subclass, to divide the batch another way."""
        dead_letters = DeadLetters(world.dead_letters)
        tasks = [
            Task(
                self._runtime(task, world, dead_letters),
                task.produce_strategy_config.build(sync_weights_interval=world.sync_weights_interval),
                task.weight,
            )
            for task in self.task_list
        ]
        return manager(
            tasks,
            engine=world.engine if world.pauses_engine else None,
            buffer=world.buffer,
            pause_deadlines=PauseDeadlines(
                request_timeout_s=self.pause_request_timeout_s, resend_interval_s=self.pause_resend_interval_s
            ),
            stall_timeout_s=self.stall_timeout_s,
            observer=world.observer,
        )

    def _runtime(self, task: TaskSpecConfig, world: World, dead_letters: DeadLetters) -> TaskRuntime:
        judger_config = task.judger
        judger = world.judgers.get(judger_config) if judger_config is not None else None
        keeps_turns = task.produce_strategy_config.keeps_turns
        replayable = task.agent_loop_config.loop_class.replayable
        agent_loop = task.agent_loop_config.build(
            engine=world.engine,
            tokenizer=world.tokenizer,
            judger=judger,
            run_seed=world.run_seed,
            placement=world.placement,
            namespace=world.namespace,
            on_pause=world.on_pause,
            turn_log=world.turn_log if keeps_turns or not replayable else None,
            context=world.context,
        )
        return TaskRuntime(
            name=task.task_name,
            agent_loop=agent_loop,
            sampler=task.sampler_config.build(world.prompts[task.task_name], waiting=world.buffer),
            buffer=world.buffer,
            stale_rule=task.produce_strategy_config.stale_rule(world.sync_weights_interval),
            is_valid_sample=task.produce_strategy_config.is_valid_sample_fn,
            failures=FailurePolicy(self.failures, dead_letters),
            replayable=replayable,
        )


def load_prompts(
    tasks: list[TaskSpecConfig],
    tokenizer: Tokenizer,
    *,
    context: int,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, PromptSet]:
    """Scan the datasets of all tasks, before any device is used. Raises DatasetError with every problem of every one.

    `context` is the model's limit for prompt and answer together. `on_progress` is told now and then how many rows of a
    dataset were scanned.
    """
    prompts: dict[str, PromptSet] = {}
    problems: list[str] = []
    for task in tasks:
        judger, tools = task.judger, task.agent_loop_config.prompt_tools()
        try:
            prompts[task.task_name] = task.sampler_config.dataset.load(
                tokenizer,
                context=context,
                max_tokens=task.agent_loop_config.sample_params.max_tokens,
                data_sources=judger.data_sources if judger is not None else None,
                on_progress=on_progress,
                # A source of a user's own need not know of tools.
                **({"tools": tools} if tools else {}),
            )
        except DatasetError as error:
            problems.extend(error.problems)
    if problems:
        raise DatasetError(problems)
    return prompts


def check_templates(tasks: list[TaskSpecConfig], tokenizer: Tokenizer) -> list[str]:
    """What the model's chat template means for the loops of these tasks, for people.

    Raises ConfigError when conversations of a task cannot go on under it.
    """
    found = [
        (task.task_name, problem) for task in tasks for problem in task.agent_loop_config.template_problems(tokenizer)
    ]
    if refused := [f"task {name!r}: {problem.text}" for name, problem in found if problem.refused]:
        raise ConfigError(refused)
    # A task that is also evaluated says the same twice.
    return list(dict.fromkeys(f"task {name!r}: {problem.text}" for name, problem in found))


def _task_problems(task: TaskSpecConfig, failures: FailurePolicyConfig) -> Iterator[str]:
    k = task.sampler_config.prompt_repeat_k
    if failures.min_group_size is not None and failures.min_group_size > k:
        yield f"failures.min_group_size is {failures.min_group_size}; task {task.task_name!r} has groups of {k}"
    judger = task.judger
    if judger is not None and judger is not task.judger_config:
        # Made from a function, a name or a mapping: no field of the task, so nobody else asks it and its parts.
        try:
            judger.check()
        except ConfigError as error:
            yield from (f"task {task.task_name!r}: judger_config: {problem}" for problem in error.problems)
