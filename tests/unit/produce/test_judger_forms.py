"""Every form that a task's `judger_config` may have, from the configuration to a produced batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.agent_loop import SingleTurnAgentLoop, SingleTurnAgentLoopConfig
from penstock.data import AdditionConfig, SamplerConfig
from penstock.errors import ConfigError
from penstock.judger import Judger, JudgerConfig, JudgerSet, NativeJudgerConfig
from penstock.ports import Local, Placement
from penstock.produce import AgentLoopManagerConfig, ProduceBatchResult, TaskSpecConfig, World, load_prompts
from penstock.replay import ReplayBuffer
from penstock.rollout import RolloutState, Verdict
from penstock.testing import CharTokenizer, EngineScript, ScriptedEngine


async def one(response: str, label: Any, extra_info: dict[str, Any]) -> float:
    return 1.0


def two(response: str, label: Any, extra_info: dict[str, Any]) -> float:
    return 2.0


class Three(Judger):
    async def judge(self, rollout: RolloutState) -> Verdict:
        return Verdict(3.0)


class ThreeConfig(JudgerConfig):
    def build(self, placement: Placement = Local()) -> Judger:  # noqa: B008 - it has no state
        return Three()


class JudgesItself(SingleTurnAgentLoop):
    async def judge_sample(self, rollout: RolloutState) -> None:
        rollout.reward = Verdict(4.0)


def spec(judger_config: Any) -> TaskSpecConfig:
    loop = SingleTurnAgentLoopConfig(loop=JudgesItself) if judger_config is None else SingleTurnAgentLoopConfig()
    return TaskSpecConfig(
        task_name="sums",
        sampler_config=SamplerConfig(dataset=AdditionConfig(), prompt_repeat_k=2),
        agent_loop_config=loop,
        judger_config=judger_config,
    )


def produced(task: TaskSpecConfig) -> ProduceBatchResult:
    config = AgentLoopManagerConfig(tasks=task)
    config.check()

    async def main() -> ProduceBatchResult:
        judgers = JudgerSet()
        world = World(
            engine=ScriptedEngine(EngineScript(tokens_per_s=1e6)),
            tokenizer=CharTokenizer(),
            judgers=judgers,
            buffer=ReplayBuffer(),
            prompts=load_prompts(config.task_list, CharTokenizer(), context=2048),
        )
        manager = config.build(world)
        try:
            return await manager.produce_batch(2, 1, model_step=0)
        finally:
            await manager.close()
            await judgers.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("judger_config", "score"),
    [
        (one, 1.0),
        (two, 2.0),
        (f"{__file__}:one", 1.0),
        (ThreeConfig(), 3.0),
        (NativeJudgerConfig(reward_handler=one), 1.0),
        ({"addition": one}, 1.0),
        ({"addition": ThreeConfig(), "other": one}, 3.0),
        ({"addition": f"{__file__}:one"}, 1.0),
        (None, 4.0),
    ],
    ids=["async", "sync", "file", "config", "native", "mapping", "mapping of configs", "mapping of names", "none"],
)
def test_every_documented_form_of_a_judger_config_judges_a_batch(judger_config: Any, score: float) -> None:
    result = produced(spec(judger_config))
    assert {r.reward.score for group in result.groups for r in group if r.reward is not None} == {score}
    assert len(result.groups) == 2


def test_a_dotted_path_is_a_judger_too() -> None:
    result = produced(spec("penstock.judger.rewards.exact_match"))
    assert {r.reward.score for group in result.groups for r in group if r.reward is not None} == {0.0}


@pytest.mark.parametrize("wrong", [3, {"addition": 3}, ThreeConfig])
def test_what_is_no_judger_is_refused_where_it_is_written(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"TaskSpecConfig\.judger_config.*test_judger_forms\.py"):
        spec(wrong)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("no.such.module", "cannot be loaded"),
        ({"addition": f"{Path(__file__)}:nobody"}, "nobody"),
        (lambda response, label, extra_info: 1.0, "it is a lambda"),
    ],
)
def test_a_judger_that_cannot_work_is_found_by_the_check(wrong: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AgentLoopManagerConfig(tasks=spec(wrong)).check()
