"""What a trainer's configuration demands of sampling."""

from __future__ import annotations

import pytest

from penstock.recipes.tiny import trainer
from penstock.rollout import SampleParams
from penstock.trainer.config import RLColocateTrainerConfig


def with_min_tokens(path: str) -> RLColocateTrainerConfig:
    params = SampleParams(max_tokens=8, min_tokens=2)
    return trainer.replace(f"{path}.tasks.0.agent_loop_config.sample_params", params)


def test_training_refuses_min_tokens_because_the_recorded_logprobs_are_of_all_tokens() -> None:
    problems = list(with_min_tokens("manager").problems())
    assert len(problems) == 1
    assert "task 'reverse': sample_params.min_tokens is 2" in problems[0]


def test_evaluation_may_use_min_tokens() -> None:
    assert not list(with_min_tokens("evaluator").problems())


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_training_refuses_a_cut_distribution(change: dict[str, float]) -> None:
    params = SampleParams(max_tokens=8, **change)  # type: ignore[arg-type]
    problems = list(trainer.replace("manager.tasks.0.agent_loop_config.sample_params", params).problems())
    assert len(problems) == 1
    assert "task 'reverse'" in problems[0]
