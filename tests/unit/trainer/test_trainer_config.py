"""What a trainer's configuration means, and what it refuses by itself."""

from __future__ import annotations

import os
from typing import Any

import pytest

from penstock import (
    AgentLoopManagerConfig,
    AsyncProduceStrategyConfig,
    ConfigError,
    EnginesConfig,
    OverlongConfig,
    ReverseWordConfig,
    RLColocateTrainerConfig,
    RLDisaggregatedTrainerConfig,
    RolloutControllerConfig,
    SampleParams,
    SamplerConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    TrainWorkerConfig,
    exact_match,
)
from penstock.cli.config_file import load_config
from penstock.cli.recipes import recipe_names
from penstock.recipes import tiny, tiny_async
from penstock.trainer.deadlines import deadline_orders


def task(**fields: Any) -> TaskSpecConfig:
    given: dict[str, Any] = {
        "task_name": "words",
        "sampler_config": SamplerConfig(dataset=ReverseWordConfig(), prompt_repeat_k=2),
        "agent_loop_config": SingleTurnAgentLoopConfig(),
        "judger_config": exact_match,
    }
    return TaskSpecConfig(**(given | fields))


def config(**fields: Any) -> RLColocateTrainerConfig:
    given: dict[str, Any] = {"model": "tiny", "total_steps": 2, "train_batch_size": 4}
    return RLColocateTrainerConfig(**(given | ({} if "manager" in fields else {"tasks": [task()]}) | fields))


def test_tasks_may_be_given_without_a_manager() -> None:
    short = config()
    long = config(manager=AgentLoopManagerConfig(tasks=[task()]))
    assert short.describe() == long.describe()
    assert config(tasks=task()).describe() == long.describe()
    assert short.replace("manager.tasks.0.weight", 2.0).manager.task_list[0].weight == 2.0
    short.check()


def test_exactly_one_of_tasks_and_manager_is_given() -> None:
    with pytest.raises(ConfigError, match="tasks and manager are both given"):
        config(tasks=[task()], manager=AgentLoopManagerConfig(tasks=[task()]))
    with pytest.raises(ConfigError, match="there is nothing to train on: give tasks"):
        RLColocateTrainerConfig(model="tiny", total_steps=1, train_batch_size=1)


def test_disaggregated_engines_have_a_process_of_their_own() -> None:
    strategy = AsyncProduceStrategyConfig(enable_partial_rollout=True)
    trainer = RLDisaggregatedTrainerConfig(
        model="tiny", total_steps=2, train_batch_size=4, tasks=task(produce_strategy_config=strategy)
    )
    trainer.check()
    assert trainer.engines.engine.process and not config().engines.engine.process


@pytest.mark.parametrize("name", recipe_names())
def test_the_deadlines_of_every_recipe_are_in_order(name: str) -> None:
    if name == "quickstart-vllm":
        pytest.skip("vLLM may not be installed")
    try:
        trainer = load_config(name)
    except ConfigError as refused:
        assert not [problem for problem in refused.problems if "timeout_s" in problem]
        return
    assert isinstance(trainer, RLColocateTrainerConfig | RLDisaggregatedTrainerConfig)
    assert all(order.is_kept for order in deadline_orders(trainer))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tasks": [task(agent_loop_config=SingleTurnAgentLoopConfig(rollout_timeout_s=900.0))]}, "rollout_timeout_s"),
        ({"tasks": [task(agent_loop_config=SingleTurnAgentLoopConfig(judge_timeout_s=1000.0))]}, "judge_timeout_s"),
        (
            {"engines": EnginesConfig(controller=RolloutControllerConfig(request_timeout_s=300.0))},
            r"3 x engines\.controller\.request_timeout_s \(300 s\) must be below manager\.stall_timeout_s \(900 s\)",
        ),
        (
            {"engines": EnginesConfig(controller=RolloutControllerConfig(control_timeout_s=30.0))},
            r"control_timeout_s \(30 s\) must be below manager\.pause_request_timeout_s \(30 s\)",
        ),
        ({"sync_timeout_s": 100.0}, r"load_timeout_s \(240 s\) must be below sync_timeout_s \(100 s\)"),
        (
            {"manager": AgentLoopManagerConfig(tasks=[task()], stall_timeout_s=250.0)},
            r"pause_timeout_s \(300 s\) must be below manager\.stall_timeout_s \(250 s\)",
        ),
    ],
)
def test_deadlines_in_an_impossible_order_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        config(**fields).check()
    # Each once, wherever it is looked at.
    assert len(refused.value.problems) == len(set(refused.value.problems))


def test_all_deadlines_that_are_out_of_order_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        config(manager=AgentLoopManagerConfig(tasks=[task()], stall_timeout_s=10.0)).check()
    assert len([problem for problem in refused.value.problems if "stall_timeout_s" in problem]) == 4


def test_trainer_and_engines_that_work_at_once_divide_the_cores_and_lend_those_they_leave_idle() -> None:
    colocated = tiny.trainer.replace("deterministic", False).replace("cpu_threads", 4)
    assert (colocated.threads(), colocated.most_threads()) == ((4, 4), None)
    apart = tiny_async.trainer.replace("deterministic", False).replace("cpu_threads", 4)
    assert (apart.threads(), apart.most_threads()) == ((2, 2), 4)
    assert apart.replace("engines.engine.process", False).most_threads() is None
    # Their number is a part of what a deterministic run computes.
    assert apart.replace("checkpoint_interval", 1).replace("deterministic", True).most_threads() is None


def test_more_threads_than_a_machine_can_use_are_refused() -> None:
    (problem,) = tiny.trainer.replace("cpu_threads", 100_000).problems()
    assert problem.startswith("cpu_threads is 100000; this process may use ")
    assert list(tiny.trainer.replace("cpu_threads", 4 * (os.cpu_count() or 1)).problems()) == []


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_a_group_that_may_shrink_to_one_is_refused_for_an_estimator_that_compares(advantage: str) -> None:
    smallest = config().replace("manager.failures.min_group_size", 1).replace("train.advantage", advantage)
    with pytest.raises(ConfigError, match=r"manager\.failures\.min_group_size is 1; .* needs at least 2"):
        smallest.check()
    smallest.replace("manager.failures.min_group_size", 2).check()


def test_a_penalty_for_length_that_begins_before_the_answer_is_refused() -> None:
    loop = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=16))
    asked = {"tasks": [task(agent_loop_config=loop)]}
    config(**asked, train=TrainWorkerConfig(overlong=OverlongConfig(buffer_tokens=16))).check()
    with pytest.raises(ConfigError, match=r"buffer_tokens is 17; task 'words' has sample_params.max_tokens=16"):
        config(**asked, train=TrainWorkerConfig(overlong=OverlongConfig(buffer_tokens=17))).check()
    config(**asked, train=TrainWorkerConfig(overlong=OverlongConfig(buffer_tokens=17, max_tokens=99))).check()
