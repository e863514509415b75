"""The evaluator over a scripted engine, on the virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.agent_loop import SingleTurnAgentLoop, SingleTurnAgentLoopConfig
from penstock.agent_loop.config import AgentLoopConfig
from penstock.data import PromptSet, ReverseWordConfig, SamplerConfig
from penstock.errors import ConfigError, UserFunctionError
from penstock.judger import JudgerSet
from penstock.ports import Completion, GenerateRequest
from penstock.produce import AsyncProduceStrategyConfig, TaskSpecConfig
from penstock.rollout import Prompt, RolloutState, SampleParams, pack_ids
from penstock.testing import CharTokenizer, EngineFaults, EngineScript, ScriptedEngine, run_virtual
from penstock.trainer.evaluator import EvalTaskConfig, Evaluation, Evaluator, EvaluatorConfig

PROMPTS = 5


async def judge(response: str, label: str, extra_info: dict[str, Any]) -> float:
    return float(int(label) % 2)


class Loop(SingleTurnAgentLoop):
    """Counts how often it was closed."""

    closed = 0

    async def close(self) -> None:
        type(self).closed += 1
        await super().close()


class Asked(ScriptedEngine):
    """Remembers what it was asked."""

    def __init__(self, script: EngineScript | None = None) -> None:
        super().__init__(script)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        return await super().generate(request)


class Weights:
    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield from ()


def task(**fields: Any) -> EvalTaskConfig:
    given: dict[str, Any] = {
        "task_name": "words",
        "dataset": ReverseWordConfig(),
        "agent_loop_config": SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=50)),
        "judger_config": judge,
    }
    return EvalTaskConfig(**(given | fields))


def build(config: EvaluatorConfig, engine: ScriptedEngine) -> Evaluator:
    prompts = [
        Prompt(messages=({"role": "user", "content": str(i)},), ids=pack_ids([1, i + 2]), ground_truth=str(i))
        for i in range(PROMPTS)
    ]
    return Evaluator(
        config,
        {"words": PromptSet(prompts)},
        engine=engine,
        tokenizer=CharTokenizer(),
        judgers=JudgerSet(),
        seed=3,
        namespace="exam/",
    )


def evaluate(config: EvaluatorConfig, engine: ScriptedEngine, steps: tuple[int, ...] = (0,)) -> list[Evaluation]:
    async def main() -> list[Evaluation]:
        evaluator = build(config, engine)
        evaluations = []
        try:
            for step in steps:
                await engine.load_weights(Weights(), step)
                evaluations.append(await evaluator.evaluate(step))
            return evaluations
        finally:
            await evaluator.close()

    return run_virtual(main(), deadline=1e5)


def test_every_prompt_is_asked_as_often_as_configured_and_the_figures_are_of_all() -> None:
    engine = Asked()
    [evaluation] = evaluate(EvaluatorConfig(tasks=[task(samples_per_prompt=2)]), engine)
    assert len(evaluation.groups) == PROMPTS and len(engine.requests) == 2 * PROMPTS
    assert evaluation.metrics["eval/accuracy"] == 2 / 5 and evaluation.metrics["eval/pass@2"] == 2 / 5
    assert evaluation.metrics["eval/failed_prompts"] == 0


def test_it_is_built_once_asks_the_same_every_time_and_is_closed_once() -> None:
    engine = Asked()
    Loop.closed = 0
    loop = AgentLoopConfig(loop=Loop, sample_params=SampleParams(max_tokens=50))
    first, second = evaluate(EvaluatorConfig(tasks=[task(agent_loop_config=loop)]), engine, steps=(0, 4))
    ids = [[rollout.rollout_id for group in e.groups for rollout in group] for e in (first, second)]
    assert sorted(ids[0]) == sorted(ids[1]) and first.metrics == second.metrics
    seeds = [(request.request_id, request.seed) for request in engine.requests]
    assert sorted(seeds[:PROMPTS]) == sorted(seeds[PROMPTS:])
    assert (first.model_step, second.model_step) == (0, 4)
    assert Loop.closed == 1


def test_its_requests_have_a_name_space_and_are_served_while_training_is_paused() -> None:
    engine = Asked()

    async def main() -> Evaluation:
        await engine.pause_generation()
        evaluator = build(EvaluatorConfig(tasks=[task()]), engine)
        try:
            return await evaluator.evaluate(0)
        finally:
            await evaluator.close()

    assert len(run_virtual(main(), deadline=1e5).groups) == PROMPTS
    assert {request.request_id.startswith("exam/") for request in engine.requests} == {True}
    assert {request.on_pause for request in engine.requests} == {"serve"}


def test_the_greedy_twin_asks_once_at_temperature_0() -> None:
    engine = Asked()
    [evaluation] = evaluate(EvaluatorConfig(tasks=[task(samples_per_prompt=3)], greedy=True), engine)
    temperatures = [request.params.temperature for request in engine.requests]
    assert temperatures.count(0.0) == PROMPTS and temperatures.count(1.0) == 3 * PROMPTS
    assert "eval/greedy_accuracy" in evaluation.metrics


def test_a_prompt_that_fails_is_counted_and_never_replaced() -> None:
    engine = Asked(EngineScript(faults=EngineFaults(fails=1.0)))
    config = EvaluatorConfig(tasks=[task()], eval_sample_num=3)
    [evaluation] = evaluate(config, engine)
    assert evaluation.groups == [] and evaluation.metrics["eval/failed_prompts"] == 3
    assert {request.group_id for request in engine.requests} == {"exam/words:0", "exam/words:1", "exam/words:2"}


def test_a_training_task_is_understood_and_its_strategy_does_not_matter() -> None:
    spec = TaskSpecConfig(
        task_name="words",
        sampler_config=SamplerConfig(dataset=ReverseWordConfig(), prompt_repeat_k=2),
        agent_loop_config=SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=50)),
        judger_config=judge,
        produce_strategy_config=AsyncProduceStrategyConfig(max_staleness=3, enable_partial_rollout=True),
    )
    engine = Asked()
    [evaluation] = evaluate(EvaluatorConfig(tasks=[spec]), engine)
    assert len(evaluation.groups) == PROMPTS and len(engine.requests) == 2 * PROMPTS


def test_a_function_of_the_users_replaces_the_figures_and_is_named_when_it_raises() -> None:
    def figures(rollouts: list[RolloutState]) -> dict[str, float]:
        return {"answers": len(rollouts)}

    [evaluation] = evaluate(EvaluatorConfig(tasks=[task()], compute_metric_func=figures), Asked())
    assert evaluation.metrics == {"eval/answers": 5.0, "eval/failed_prompts": 0.0}

    def wrong(rollouts: list[RolloutState]) -> dict[str, float]:
        raise KeyError("score")

    with pytest.raises(UserFunctionError, match="compute_metric_func raised KeyError"):
        evaluate(EvaluatorConfig(tasks=[task()], compute_metric_func=wrong), Asked())


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([], "there is no task to evaluate"),
        ([task(), task()], "is used 2 times"),
        ([task(task_name="a-greedy")], "names the greedy twin"),
        ([task(judger_config=None)], "evaluation needs a score"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tasks: list[EvalTaskConfig], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EvaluatorConfig(tasks=tasks).check()
