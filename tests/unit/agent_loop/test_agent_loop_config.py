from __future__ import annotations

from typing import Any

import pytest

from penstock.agent_loop import AgentLoop, AgentLoopConfig, SingleTurnAgentLoop, SingleTurnAgentLoopConfig
from penstock.errors import ConfigError
from penstock.rollout import Group


class Greets(SingleTurnAgentLoop):
    def __init__(self, *, greeting: str, loudness: int = 1, **rest: Any) -> None:
        super().__init__(**rest)


class Silent(AgentLoop):
    pass


class PlaysGroups(AgentLoop):
    async def generate_group(self, group: Group, *, enable_partial_rollout: bool) -> Group:
        return group


def problems(**fields: Any) -> list[str]:
    try:
        AgentLoopConfig(**fields).check()
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"loop": "penstock.agent_loop.NoSuchLoop"}, "NoSuchLoop"),
        ({"loop": "no_such_module.Loop"}, "cannot be imported"),
        ({"loop": "penstock.rollout.Prompt"}, "must be a subclass of penstock.agent_loop.AgentLoop"),
        ({"loop": "penstock.agent_loop.rollout_seed"}, "must be a subclass"),
        ({"loop": Silent}, "Silent does not define generate_sample"),
        ({"loop": Greets}, "needs 'greeting'"),
        (
            {"loop": Greets, "arguments": {"greeting": "hi", "loudnes": 3}},
            "takes no 'loudnes'. Did you mean 'loudness'?",
        ),
        ({"loop": SingleTurnAgentLoop, "arguments": {"greeting": "hi"}}, "takes no 'greeting'"),
        ({"loop": SingleTurnAgentLoop, "arguments": {"run_seed": 3}}, "'run_seed' is given to every loop"),
    ],
)
def test_a_loop_that_cannot_be_built_is_found_by_the_check(fields: dict[str, Any], problem: str) -> None:
    found = problems(**fields)
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"loop": SingleTurnAgentLoop},
        {"loop": "penstock.agent_loop.SingleTurnAgentLoop"},
        {"loop": PlaysGroups},
        {"loop": Greets, "arguments": {"greeting": "hi", "loudness": 3}},
    ],
)
def test_a_loop_that_can_be_built_has_no_problem(fields: dict[str, Any]) -> None:
    assert problems(**fields) == []


def test_deadlines_are_finite() -> None:
    with pytest.raises(ConfigError, match="rollout_timeout_s"):
        SingleTurnAgentLoopConfig(rollout_timeout_s=float("inf"))
