"""Evaluator: how good the weights are on prompts that are not trained.

Groups are made by an `AgentLoopManager` of its own with a buffer of its own, so evaluation never mixes with training.
Every prompt is asked exactly once; one that fails is counted as failed and never replaced by another. Its requests go
on while production is paused: an evaluation beside training never waits for a drain that waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pydantic

from penstock.agent_loop import AgentLoopConfig
from penstock.config import Config
from penstock.data import PromptSet, PromptSourceConfig, SamplerConfig
from penstock.errors import UserFunctionError
from penstock.events import Nobody, Observer
from penstock.judger import JudgerSet
from penstock.ports import Engine, Placement, Tokenizer
from penstock.produce import AgentLoopManagerConfig, AskOnceStrategyConfig, TaskSpecConfig, World
from penstock.produce.config import JudgerChoice
from penstock.replay import ReplayBuffer
from penstock.rollout import FinishReason, Group, RolloutState

GREEDY = "-greedy"
"""What the greedy twin of a task is called."""

NAMESPACE = "eval/"
"""Tells the evaluation's requests from training's on the same engines."""


class EvalTaskConfig(Config):
    """A named set of prompts to evaluate on, with its own loop and judger."""

    task_name: str = pydantic.Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    """In metrics."""
    dataset: PromptSourceConfig
    """Where the prompts come from."""
    agent_loop_config: AgentLoopConfig
    """What plays them."""
    judger_config: JudgerChoice
    """As that of a task."""
    samples_per_prompt: int = pydantic.Field(default=1, ge=1)
    """How often each is asked: k of pass@k."""

    def spec(self) -> TaskSpecConfig:
        return TaskSpecConfig(
            task_name=self.task_name,
            sampler_config=SamplerConfig(dataset=self.dataset, prompt_repeat_k=self.samples_per_prompt, shuffle=False),
            agent_loop_config=self.agent_loop_config,
            judger_config=self.judger_config,
            produce_strategy_config=AskOnceStrategyConfig(),
        )

    def greedy(self) -> EvalTaskConfig:
        """The same prompts, once each, at temperature 0."""
        return EvalTaskConfig(
            task_name=self.task_name + GREEDY,
            dataset=self.dataset,
            agent_loop_config=self.agent_loop_config.replace("sample_params.temperature", 0.0),
            judger_config=self.judger_config,
        )


class EvaluatorConfig(Config):
    """What is evaluated, how often each prompt is asked, and what is made of the answers."""

    tasks: list[EvalTaskConfig | TaskSpecConfig]
    """Of a training task's configuration the prompts, their number of samples, the loop and the judger are used."""
    greedy: bool = False
    """Ask every prompt once more at temperature 0."""
    eval_sample_num: int | None = pydantic.Field(default=None, ge=1)
    """How many prompts of each task; None asks all."""
    success_score: float = 1.0
    """A score of at least this counts as right."""
    compute_metric_func: Callable[..., Any] | None = None
    """`(rollouts) -> dict[str, float]` in place of the default metrics."""

    @property
    def eval_tasks(self) -> list[EvalTaskConfig]:
        return [task if isinstance(task, EvalTaskConfig) else _of_training(task) for task in self.tasks]

    def problems(self) -> Iterator[str]:
        if not self.tasks:
            yield "there is no task to evaluate; it needs at least 1, or no evaluator"
        for task in self.tasks:
            if task.task_name.endswith(GREEDY):
                yield f"task_name {task.task_name!r} ends in {GREEDY!r}, which names the greedy twin of a task"
            if task.judger_config is None and not task.agent_loop_config.sets_reward:
                yield f"task {task.task_name!r} has no judger_config; evaluation needs a score"
        yield from self.manager_config().problems()

    def manager_config(self) -> AgentLoopManagerConfig:
        """All tasks and their greedy twins, each prompt once."""
        tasks = self.eval_tasks + [task.greedy() for task in self.eval_tasks if self.greedy]
        return AgentLoopManagerConfig(tasks=[task.spec() for task in tasks])


class Evaluation(msgspec.Struct, frozen=True):
    """One evaluation: of which weights, what came out, and the groups it was computed from."""

    model_step: int
    metrics: dict[str, float]
    groups: list[Group]


class Evaluator:
    """Built once and asked as often as wanted, one evaluation at a time."""

    def __init__(
        self,
        config: EvaluatorConfig,
        prompts: dict[str, PromptSet],
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        judgers: JudgerSet,
        seed: int,
        namespace: str = NAMESPACE,
        dead_letters: Path | None = None,
        observer: Observer | None = None,
        placement: Placement | None = None,
        context: int = 0,
    ) -> None:
        """`prompts` are by task, those of a greedy twin under the name of its task."""
        self._config = config
        manager_config = config.manager_config()
        asked = {
            task.task_name: _first(prompts[task.task_name.removesuffix(GREEDY)], config.eval_sample_num)
            for task in manager_config.task_list
        }
        self._sizes = {name: len(prompt_set) for name, prompt_set in asked.items()}
        self._manager = manager_config.build(
            World(
                engine=engine,
                tokenizer=tokenizer,
                judgers=judgers,
                buffer=ReplayBuffer(),
                prompts=asked,
                run_seed=seed,
                dead_letters=dead_letters,
                observer=observer or Nobody(),
                pauses_engine=False,
                on_pause="serve",
                namespace=namespace,
                placement=placement,
                context=context,
            )
        )

    async def evaluate(self, model_step: int) -> Evaluation:
        """Ask everything of the weights the engine serves now, paused or not."""
        result = await self._manager.ask(self._sizes, model_step=model_step)
        metrics: dict[str, float] = {}
        for greedy in (False, True) if self._config.greedy else (False,):
            chosen = [g for g in result.groups if g[0].task_name.endswith(GREEDY) == greedy]
            asked = sum(n for name, n in self._sizes.items() if name.endswith(GREEDY) == greedy)
            metrics |= self._metrics(chosen, asked, "eval/greedy_" if greedy else "eval/")
        return Evaluation(model_step, metrics, result.groups)

    async def close(self) -> None:
        await self._manager.close()

    def _metrics(self, groups: list[Group], asked: int, prefix: str) -> dict[str, float]:
        function = self._config.compute_metric_func
        rollouts = [rollout for group in groups for rollout in group]
        if function is not None:
            try:
                computed = {str(name): float(value) for name, value in function(rollouts).items()}
            except Exception as error:
                raise UserFunctionError(f"compute_metric_func raised {type(error).__name__}: {error}") from error
        else:
            computed = default_metrics(groups, self._config.success_score)
        return {f"{prefix}{name}": value for name, value in computed.items()} | {
            f"{prefix}failed_prompts": float(asked - len(groups))
        }


def default_metrics(groups: Sequence[Group], success_score: float) -> dict[str, float]:
    """Accuracy, score, pass@k and avg@k, lengths; per data source when there are several."""
    metrics = _one_source(groups, success_score)
    sources = sorted({group[0].data_source for group in groups})
    if len(sources) > 1:
        for source in sources:
            chosen = [group for group in groups if group[0].data_source == source]
            metrics |= {f"{source}/{name}": value for name, value in _one_source(chosen, success_score).items()}
    return metrics


def _one_source(groups: Sequence[Group], success_score: float) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group]
    if not rollouts:
        return {"accuracy": math.nan, "score": math.nan}
    k = min(len(group) for group in groups)
    right = [[_score(rollout) >= success_score for rollout in group] for group in groups]
    return {
        "accuracy": float(np.mean([value for row in right for value in row])),
        "score": float(np.mean([_score(rollout) for rollout in rollouts])),
        f"pass@{k}": float(np.mean([any(row[:k]) for row in right])),
        f"avg@{k}": float(np.mean([np.mean(row[:k]) for row in right])),
        "length": float(np.mean([rollout.num_tokens for rollout in rollouts])),
        "truncated_share": float(np.mean([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts])),
    }


def _score(rollout: RolloutState) -> float:
    assert rollout.reward is not None, f"{rollout.rollout_id} is completed without a score"
    return rollout.reward.score


def _of_training(task: TaskSpecConfig) -> EvalTaskConfig:
    return EvalTaskConfig(
        task_name=task.task_name,
        dataset=task.sampler_config.dataset,
        agent_loop_config=task.agent_loop_config,
        judger_config=task.judger_config,
        samples_per_prompt=task.sampler_config.prompt_repeat_k,
    )


def _first(prompts: PromptSet, n: int | None) -> PromptSet:
    return prompts if n is None else PromptSet(prompts.prompts[:n])
