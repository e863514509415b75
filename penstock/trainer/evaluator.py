"""Evaluator: how good the weights are on prompts that are not trained.

Groups are made by an `AgentLoopManager` of its own with a buffer of its own, so evaluation never mixes with training.
Every prompt is asked exactly once; one that fails is counted as failed and never replaced by another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pydantic

from penstock.config import Config
from penstock.data import PromptSet
from penstock.errors import UserFunctionError
from penstock.events import Nobody, Observer
from penstock.judger import JudgerSet
from penstock.ports import Engine, Tokenizer
from penstock.produce import (
    AgentLoopManagerConfig,
    AskOnceStrategyConfig,
    TaskSpecConfig,
    World,
)
from penstock.replay import ReplayBuffer
from penstock.rollout import FinishReason, Group, RolloutState

GREEDY = "-greedy"
"""What the greedy twin of a task is called."""

ComputeMetric = Callable[[list[RolloutState]], dict[str, float]]


class EvaluatorConfig(Config):
    tasks: list[TaskSpecConfig]
    """`sampler_config.prompt_repeat_k` is the number of samples per prompt."""
    greedy: bool = False
    """Ask every prompt once more at temperature 0."""
    eval_sample_num: int | None = pydantic.Field(default=None, ge=1)
    """How many prompts of each task; None asks all."""
    success_score: float = 1.0
    """A score of at least this counts as right."""
    compute_metric_func: Callable[..., Any] | None = None
    """`(rollouts) -> dict[str, float]` in place of the default metrics."""

    def problems(self) -> Iterator[str]:
        if not self.tasks:
            yield "there is no task to evaluate; it needs at least 1, or no evaluator"
        for task in self.tasks:
            if task.task_name.endswith(GREEDY):
                yield f"task_name {task.task_name!r} ends in {GREEDY!r}, which names the greedy twin of a task"
            if task.judger_config is None:
                yield f"task {task.task_name!r} has no judger_config; evaluation needs a score"
        yield from self.manager_config().problems()

    def manager_config(self) -> AgentLoopManagerConfig:
        """All tasks and their greedy twins, each prompt once, nothing refilled."""
        sampled = [_ask_once(task) for task in self.tasks]
        return AgentLoopManagerConfig(tasks=sampled + [_greedy(task) for task in sampled if self.greedy])


class Evaluation(msgspec.Struct, frozen=True):
    """One evaluation: of which weights, what came out, and the groups it was computed from."""

    model_step: int
    metrics: dict[str, float]
    groups: list[Group]


class Evaluator:
    def __init__(
        self,
        config: EvaluatorConfig,
        prompts: dict[str, PromptSet],
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        judgers: JudgerSet,
        seed: int,
        dead_letters: Path | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._config = config
        self._prompts = {name: _first(prompt_set, config.eval_sample_num) for name, prompt_set in prompts.items()}
        self._engine = engine
        self._tokenizer = tokenizer
        self._judgers = judgers
        self._seed = seed
        self._dead_letters = dead_letters
        self._observer = observer or Nobody()

    async def evaluate(self, model_step: int, *, shares_engine: bool = False) -> Evaluation:
        """Ask everything of the weights the engine serves now.

        The engine is paused when it returns; with `shares_engine` it must be running, and is left so.
        """
        config = self._config.manager_config()
        world = World(
            engine=self._engine,
            tokenizer=self._tokenizer,
            judgers=self._judgers,
            buffer=ReplayBuffer(),
            prompts={task.task_name: self._prompts[_base_name(task.task_name)] for task in config.task_list},
            run_seed=self._seed,
            dead_letters=self._dead_letters,
            observer=self._observer,
            pauses_engine=not shares_engine,
            namespace="eval/",
        )
        manager = config.build(world)
        sizes = {name: len(prompts) for name, prompts in world.prompts.items()}
        try:
            result = await manager.ask(sizes, model_step=model_step)
        finally:
            await manager.close()
        metrics: dict[str, float] = {}
        for greedy in (False, True) if self._config.greedy else (False,):
            chosen = [g for g in result.groups if g[0].task_name.endswith(GREEDY) == greedy]
            asked = sum(n for name, n in sizes.items() if name.endswith(GREEDY) == greedy)
            metrics |= self._metrics(chosen, asked, "eval/greedy_" if greedy else "eval/")
        return Evaluation(model_step, metrics, result.groups)

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


def _ask_once(task: TaskSpecConfig) -> TaskSpecConfig:
    once = task.replace("produce_strategy_config", AskOnceStrategyConfig())
    return once.replace("sampler_config.shuffle", False).replace("weight", 1.0)


def _greedy(task: TaskSpecConfig) -> TaskSpecConfig:
    once = task.replace("sampler_config.prompt_repeat_k", 1).replace("task_name", task.task_name + GREEDY)
    return once.replace("agent_loop_config.sample_params.temperature", 0.0)


def _base_name(task_name: str) -> str:
    return task_name.removesuffix(GREEDY)


def _first(prompts: PromptSet, n: int | None) -> PromptSet:
    return prompts if n is None else PromptSet(prompts.prompts[:n])
