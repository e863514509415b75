"""What a run is: model, engine, tasks, training, evaluation. One Python file composes it, `build().fit()` runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pydantic

from penstock.agent_loop import SingleTurnAgentLoop, ToolAgentLoop
from penstock.config import Config, dotted_name
from penstock.engine import EmbeddedEngineConfig, EnginesConfig
from penstock.learn import TrainWorkerConfig
from penstock.learn.advantages import COMPARES_SIBLINGS
from penstock.learn.overlong import OverlongConfig
from penstock.models.cores import available_cores
from penstock.produce import (
    AgentLoopManagerConfig,
    SyncProduceStrategyConfig,
    TaskSpecConfig,
    default_should_continue_fn,
)
from penstock.replay import ReplayBufferConfig
from penstock.resources import RunResourcesConfig
from penstock.trainer.deadlines import deadline_problems
from penstock.trainer.display import make_display
from penstock.trainer.distillation import DistillationConfig
from penstock.trainer.evaluator import EvaluatorConfig
from penstock.trainer.observers import Observers
from penstock.trainer.trackers import JsonlTrackerConfig, SinkConfig, TensorBoardTrackerConfig
from penstock.trainer.trial import custom_function_problems

if TYPE_CHECKING:
    from penstock.trainer.colocate import RLColocateTrainer
    from penstock.trainer.disaggregated import RLDisaggregatedTrainer
    from penstock.trainer.site import Site


MAX_THREADS_PER_CORE = 4


class RLTrainerConfig(Config):
    """What both trainers have in common."""

    model: str
    """A known name (`penstock models`), a directory in Hugging Face format, or a hub id."""
    engines: EnginesConfig = EnginesConfig()
    """What answers, how many of it, and how the weights reach it."""
    train: TrainWorkerConfig = TrainWorkerConfig()
    """Optimiser, loss and advantages."""
    tasks: TaskSpecConfig | list[TaskSpecConfig] | None = None
    """What is trained on, for short: becomes `manager.tasks`, and is kept and changed there."""
    manager: AgentLoopManagerConfig = pydantic.Field(default_factory=lambda: AgentLoopManagerConfig(tasks=[]))
    """The tasks, and how they are produced. Exactly one of `tasks` and `manager` is given."""
    replay_buffer: ReplayBufferConfig = ReplayBufferConfig(storage="sqlite")
    """Where groups wait for training."""
    resources: RunResourcesConfig = RunResourcesConfig()
    """What train ranks and engines take of a cluster."""
    evaluator: EvaluatorConfig | None = None
    """What is evaluated; None: nothing."""
    distillation: DistillationConfig | None = None
    """Teachers that score what the student samples."""
    trackers: list[SinkConfig] = [JsonlTrackerConfig(), TensorBoardTrackerConfig()]
    """Where the metrics go."""
    total_steps: int = pydantic.Field(ge=1, le=10**9)
    """Train steps of the whole run."""
    train_batch_size: int = pydantic.Field(ge=1, le=10**6)
    """In groups."""
    sync_weights_interval: int = pydantic.Field(default=1, ge=1, le=10**9)
    """Train steps from one weight sync to the next."""
    eval_interval: int = pydantic.Field(default=10, ge=1, le=10**9)
    """Evaluate after every so many steps; always before the first and after the last."""
    checkpoint_interval: int = pydantic.Field(default=10, ge=1, le=10**9)
    """Checkpoint after every so many steps; always before the first and after the last."""
    keep_checkpoints: int = pydantic.Field(default=2, ge=2, le=10**6)
    """How many of the newest; at least two, so that one may be damaged."""
    hf_interval: int | None = pydantic.Field(default=None, ge=1, le=10**9)
    """Export the weights in Hugging Face format after every so many steps; always after the last."""
    seed: int = 0
    """Of everything that is drawn at random."""
    deterministic: bool = False
    """Two runs give identical weights on the same CPU, thread count and versions. Slower."""
    cpu_threads: int | None = pydantic.Field(default=None, ge=1)
    """Of torch. None: as many as there are cores, divided where trainer and engines work at once; there each uses those
    that the other leaves idle. Fewer while other processes need the cores; not in a deterministic run."""
    sync_timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """For new weights to reach the engines."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _tasks_for_short(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        rest = {name: value for name, value in values.items() if name != "tasks"}
        tasks = values.get("tasks")
        if tasks is None and "manager" not in values:
            raise ValueError("there is nothing to train on: give tasks=[...], or manager=AgentLoopManagerConfig(...)")
        if tasks is None:
            return rest
        if "manager" in values:
            raise ValueError("tasks and manager are both given; the manager has its tasks: give one of the two")
        return rest | {"manager": AgentLoopManagerConfig(tasks=tasks if isinstance(tasks, list) else [tasks])}

    def problems(self) -> Iterator[str]:
        tasks = self.manager.task_list
        yield from _sampling_problems(tasks)
        if self.distillation is not None:
            yield from _distillation_problems(tasks)
        yield from deadline_problems(self)
        cores = available_cores()
        if self.cpu_threads is not None and self.cpu_threads > MAX_THREADS_PER_CORE * cores:
            yield (
                f"cpu_threads is {self.cpu_threads}; this process may use {cores} cores, and more than "
                f"{MAX_THREADS_PER_CORE * cores} threads only stand in each other's way"
            )
        if self.train_batch_size % self.train.updates_per_batch:
            yield (
                f"train_batch_size is {self.train_batch_size} and train.updates_per_batch is "
                f"{self.train.updates_per_batch}; the first must be a multiple of the second"
            )
        if self.deterministic and self.checkpoint_interval % self.sync_weights_interval:
            yield (
                f"checkpoint_interval is {self.checkpoint_interval} and sync_weights_interval is "
                f"{self.sync_weights_interval}; an exact (deterministic) run is resumed where weights are synced: the "
                "first must be a multiple of the second"
            )
        yield from _overlong_problems(self.train.overlong, tasks)
        for task in tasks:
            for loop in (SingleTurnAgentLoop, ToolAgentLoop):
                if task.judger_config is None and task.agent_loop_config.loop is loop:
                    yield f"task {task.task_name!r} has no judger_config, and {loop.__name__} sets no reward itself"
            if self.train.advantage in COMPARES_SIBLINGS and task.sampler_config.prompt_repeat_k < 2:
                yield (
                    f"task {task.task_name!r}: sampler_config.prompt_repeat_k is "
                    f"{task.sampler_config.prompt_repeat_k}; {self.train.advantage} compares siblings and needs at "
                    "least 2 (recipes use 8)"
                )
        smallest = self.manager.failures.min_group_size
        if self.train.advantage in COMPARES_SIBLINGS and smallest is not None and smallest < 2:
            yield (
                f"manager.failures.min_group_size is {smallest}; train.advantage is {self.train.advantage!r}, which "
                "compares siblings and needs at least 2"
            )

        sizes = {task.sampler_config.prompt_repeat_k for task in tasks} | (
            {smallest} if smallest is not None else set()
        )
        yield from custom_function_problems(self.train, group_sizes=sorted(sizes) or [2])

    def replace(self, path: str, value: Any) -> Self:
        """`tasks...` is `manager.tasks...`, however the tasks were given."""
        return super().replace(f"manager.{path}" if path.split(".")[0] == "tasks" else path, value)

    def describe(self) -> dict[str, Any]:
        """Without `tasks`, which is another word for `manager.tasks`."""
        return {name: value for name, value in super().describe().items() if name != "tasks"}

    def that_runs(self, *, trains: bool) -> Config:
        """What of it is built: everything, or only what an evaluation needs."""
        return self if trains or self.evaluator is None else self.evaluator

    def threads(self) -> tuple[int | None, int | None]:
        """CPU threads of the trainer and of each engine; None leaves it to torch."""
        return self.cpu_threads, self.cpu_threads

    def most_threads(self) -> int | None:
        """What each of them may use while the others rest; None: no more than `threads`."""
        return None

    def evaluate(
        self, *, observers: Observers | None = None, out_dir: Path | None = None, site: Site | None = None
    ) -> dict[str, float]:
        """The evaluator alone, on `model` as it is.

        With `out_dir` the answers (`answers.jsonl`) and the figures (`result.json`) are written there.
        """
        from penstock.trainer.parts import evaluate_once

        for part in (self.engines, self.evaluator):
            if part is not None:
                part.check()
        return evaluate_once(self, observers or plain_observers(), out_dir, site)


class RLColocateTrainerConfig(RLTrainerConfig):
    """Engine and trainer take turns on the same devices."""

    def build(
        self,
        *,
        run_dir: Path | str,
        observers: Observers | None = None,
        resume: str | None = None,
        allow_change: Sequence[str] = (),
        profile: bool = False,
        site: Site | None = None,
    ) -> RLColocateTrainer:
        """See `build_trainer`."""
        from penstock.trainer.colocate import RLColocateTrainer
        from penstock.trainer.parts import build_trainer

        return build_trainer(
            self,
            RLColocateTrainer,
            Path(run_dir),
            observers,
            resume,
            allow_change=allow_change,
            profile=profile,
            site=site,
        )


class RLDisaggregatedTrainerConfig(RLTrainerConfig):
    """A producer in the background and the trainer in front of it, each on devices of its own."""

    engines: EnginesConfig = EnginesConfig(engine=EmbeddedEngineConfig(process=True))

    def threads(self) -> tuple[int | None, int | None]:
        """Trainer and engines work at once, so they divide the cores."""
        cores = self.cpu_threads or available_cores()
        return max(1, cores - cores // 2), max(1, cores // 2 // self.engines.num_engines)

    def most_threads(self) -> int | None:
        """Whoever waits lends its cores; in a deterministic run the numbers are fixed. What another thread of the same
        process uses cannot be told from one's own."""
        if self.deterministic or not self.engines.engine.process:
            return None
        return self.cpu_threads or available_cores()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for task in self.manager.task_list:
            strategy = task.produce_strategy_config
            if isinstance(strategy, SyncProduceStrategyConfig):
                yield (
                    f"task {task.task_name!r}: produce_strategy_config is SyncProduceStrategyConfig; a producer beside "
                    "the trainer needs AsyncProduceStrategyConfig"
                )
            if strategy.should_continue_fn is not default_should_continue_fn:
                yield (
                    f"task {task.task_name!r}: should_continue_fn is {dotted_name(strategy.should_continue_fn)}; only "
                    "a colocated run can end production early"
                )

    def build(
        self,
        *,
        run_dir: Path | str,
        observers: Observers | None = None,
        resume: str | None = None,
        allow_change: Sequence[str] = (),
        profile: bool = False,
        site: Site | None = None,
    ) -> RLDisaggregatedTrainer:
        """See `build_trainer`."""
        from penstock.trainer.disaggregated import RLDisaggregatedTrainer
        from penstock.trainer.parts import build_trainer

        return build_trainer(
            self,
            RLDisaggregatedTrainer,
            Path(run_dir),
            observers,
            resume,
            allow_change=allow_change,
            profile=profile,
            site=site,
        )


def plain_observers() -> Observers:
    """For a run that nobody gave any: lines on standard output."""
    return Observers(display=make_display(terminal=False))


def _overlong_problems(overlong: OverlongConfig | None, tasks: list[TaskSpecConfig]) -> Iterator[str]:
    """Where the budget is the task's own."""
    if overlong is None or overlong.buffer_tokens is None or overlong.max_tokens is not None:
        return
    for task in tasks:
        if overlong.buffer_tokens > (budget := task.agent_loop_config.sample_params.max_tokens):
            yield (
                f"train.overlong.buffer_tokens is {overlong.buffer_tokens}; task {task.task_name!r} has "
                f"sample_params.max_tokens={budget}, so even an empty answer would cost score: it may be at most that"
            )


def _distillation_problems(tasks: list[TaskSpecConfig]) -> Iterator[str]:
    for task in tasks:
        if (temperature := task.agent_loop_config.sample_params.temperature) != 1:
            yield (
                f"task {task.task_name!r}: sample_params.temperature is {temperature}; a teacher scores at 1, and two "
                "temperatures have different distributions to compare: distillation needs 1"
            )


def _sampling_problems(tasks: list[TaskSpecConfig]) -> Iterator[str]:
    """The trainer computes logprobs of the whole distribution: sampling must be from it."""
    for task in tasks:
        if (temperature := task.agent_loop_config.sample_params.temperature) <= 0:
            yield f"task {task.task_name!r}: sample_params.temperature is {temperature}; training needs it above 0"
        if task.agent_loop_config.sample_params.truncates:
            yield (
                f"task {task.task_name!r}: sample_params cut the distribution (top_p, top_k or min_p), so its logprobs "
                "are not the trainer's; training needs top_p=1, top_k=0, min_p=0"
            )
        if task.agent_loop_config.sample_params.min_tokens:
            yield (
                f"task {task.task_name!r}: sample_params.min_tokens is "
                f"{task.agent_loop_config.sample_params.min_tokens}; it forbids to end an answer, so its "
                "logprobs are not the trainer's; training needs 0 (reward length instead), evaluation may use it"
            )
