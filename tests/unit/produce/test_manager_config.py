from __future__ import annotations

from typing import Any

import pytest

from penstock.agent_loop import AgentLoop, AgentLoopConfig, SingleTurnAgentLoopConfig
from penstock.data import AdditionConfig, SamplerConfig
from penstock.errors import ConfigError
from penstock.judger import JudgerConfig, JudgerSet
from penstock.ports import FinishedTurn, Judger, Local, Placement
from penstock.produce import (
    AgentLoopManagerConfig,
    AsyncProduceStrategyConfig,
    FailurePolicyConfig,
    ProduceStrategyConfig,
    SyncProduceStrategyConfig,
    TaskSpecConfig,
    World,
    load_prompts,
)
from penstock.replay import ReplayBuffer
from penstock.rollout import RolloutState
from penstock.testing import CharTokenizer, ScriptedEngine, ScriptedJudger, run_virtual


class ScriptedJudgerConfig(JudgerConfig):
    def build(self, placement: Placement = Local()) -> Judger:  # noqa: B008 - it has no state
        return ScriptedJudger()


def spec(name: str = "sums", **options: Any) -> TaskSpecConfig:
    return TaskSpecConfig(
        task_name=name,
        sampler_config=SamplerConfig(dataset=AdditionConfig(), prompt_repeat_k=2),
        agent_loop_config=SingleTurnAgentLoopConfig(),
        judger_config=ScriptedJudgerConfig(),
        **options,
    )


def test_one_task_needs_no_list_and_is_synchronous_by_default() -> None:
    config = AgentLoopManagerConfig(tasks=spec())
    config.check()
    assert config.task_list == [spec()]
    assert isinstance(spec().produce_strategy_config, SyncProduceStrategyConfig)
    assert spec().weight == 1.0


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        ([], "no task"),
        ([spec("a"), spec("a")], "task_name 'a' is used 2 times"),
        ([spec("a", weight=0.0), spec("b", weight=0.0)], "all weights are 0"),
    ],
)
def test_tasks_that_cannot_work_are_refused(tasks: list[TaskSpecConfig], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AgentLoopManagerConfig(tasks=tasks).check()


def test_a_minimum_beyond_the_group_is_refused() -> None:
    config = AgentLoopManagerConfig(tasks=spec(), failures=FailurePolicyConfig(min_group_size=3))
    with pytest.raises(ConfigError, match=r"min_group_size is 3.*groups of 2"):
        config.check()


def test_every_problem_is_named_at_once() -> None:
    strategy = AsyncProduceStrategyConfig(tail_batch_max_tries=2)
    config = AgentLoopManagerConfig(tasks=[spec("a", produce_strategy_config=strategy), spec("a")])
    with pytest.raises(ConfigError) as refused:
        config.check()
    assert len(refused.value.problems) == 2


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_a_finite_share(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight"):
        spec(weight=weight)


def test_the_deadlines_have_the_stated_defaults() -> None:
    config = AgentLoopManagerConfig(tasks=spec())
    assert (config.pause_request_timeout_s, config.pause_resend_interval_s) == (30.0, 5.0)
    assert SyncProduceStrategyConfig().pause_timeout_s == AsyncProduceStrategyConfig().pause_timeout_s == 300.0
    assert (config.failures.infrastructure_retries, config.failures.data_retries) == (3, 1)


def test_a_configured_manager_produces() -> None:
    config = AgentLoopManagerConfig(tasks=[spec("a"), spec("b", weight=3.0)])
    tokenizer = CharTokenizer()
    world = World(
        engine=ScriptedEngine(),
        tokenizer=tokenizer,
        judgers=JudgerSet(),
        buffer=ReplayBuffer(),
        prompts=load_prompts(config.task_list, tokenizer, context=2048),
    )
    manager = config.build(world)
    result = run_virtual(manager.produce_batch(4, 1, model_step=0))
    assert {name: task.groups for name, task in result.tasks.items()} == {"a": 1, "b": 3}


class TwoTurns(AgentLoop):
    async def generate_sample(self, rollout: RolloutState) -> None:
        await self.generate(rollout)
        await self.generate(rollout)


class Kept:
    def __init__(self) -> None:
        self.turns: list[FinishedTurn] = []

    async def append(self, turn: FinishedTurn, *, durable: bool = False) -> None:
        self.turns.append(turn)


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        (SyncProduceStrategyConfig(), False),
        (AsyncProduceStrategyConfig(), False),
        (AsyncProduceStrategyConfig(enable_partial_rollout=True), True),
    ],
)
def test_finished_turns_are_kept_where_a_rollout_goes_on_from_them(strategy: ProduceStrategyConfig, kept: bool) -> None:
    task = spec(produce_strategy_config=strategy).replace("agent_loop_config", AgentLoopConfig(loop=TwoTurns))
    config, tokenizer, log = AgentLoopManagerConfig(tasks=task), CharTokenizer(), Kept()
    world = World(
        engine=ScriptedEngine(),
        tokenizer=tokenizer,
        judgers=JudgerSet(),
        buffer=ReplayBuffer(),
        prompts=load_prompts(config.task_list, tokenizer, context=2048),
        turn_log=log,
    )
    run_virtual(config.build(world).produce_batch(1, 1, model_step=0))
    assert bool(log.turns) is kept


def too_few() -> bool:
    return True


async def asynchronous(samples: list[RolloutState]) -> bool:
    return True


@pytest.mark.parametrize("strategy", [SyncProduceStrategyConfig, AsyncProduceStrategyConfig])
@pytest.mark.parametrize(
    ("filters", "problem"),
    [
        ({"is_valid_sample_fn": too_few}, r"is_valid_sample_fn: .*too_few is called as \(samples\) -> bool"),
        ({"is_valid_sample_fn": asynchronous}, "is_valid_sample_fn: .*asynchronous is async"),
        (
            {"should_continue_fn": too_few},
            r"should_continue_fn: .*too_few is called as \(completed_count, batch_size\)",
        ),
    ],
)
def test_a_filter_of_the_wrong_signature_is_found_by_the_check(
    strategy: type[ProduceStrategyConfig], filters: dict[str, Any], problem: str
) -> None:
    config = AgentLoopManagerConfig(tasks=spec(produce_strategy_config=strategy(**filters)))
    with pytest.raises(ConfigError, match=problem):
        config.check()


@pytest.mark.parametrize("share", [float("inf"), float("nan"), -1.0])
def test_over_sampling_is_a_finite_share(share: float) -> None:
    with pytest.raises(ConfigError, match="over_sample_threshold"):
        AsyncProduceStrategyConfig(over_sample_threshold=share)


def test_a_token_bound_that_does_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    AsyncProduceStrategyConfig(max_token_staleness=2, max_staleness=1, enable_partial_rollout=True).build()
    assert "max_token_staleness=2 above max_staleness=1 masks no token" in caplog.text
    caplog.clear()
    AsyncProduceStrategyConfig(max_token_staleness=1, max_staleness=1, enable_partial_rollout=True).build()
    assert not caplog.text


def test_a_field_of_a_task_is_set_by_its_place_also_when_there_is_only_one() -> None:
    for tasks in (spec(), [spec()], [spec(), spec("b")]):
        changed = AgentLoopManagerConfig(tasks=tasks).replace("tasks.0.weight", 3.0)
        assert changed.task_list[0].weight == 3.0
        assert changed.task_list[1:] == AgentLoopManagerConfig(tasks=tasks).task_list[1:]
    with pytest.raises(ConfigError, match="has no '1'"):
        AgentLoopManagerConfig(tasks=spec()).replace("tasks.1.weight", 3.0)
