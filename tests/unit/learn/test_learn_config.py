import math
import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError
from transformers import get_scheduler

from penstock.errors import ConfigError
from penstock.learn.config import LossConfig, TrainWorkerConfig


def test_importing_the_configuration_and_the_batch_imports_no_torch() -> None:
    code = "import sys, penstock.learn.config, penstock.learn.batch, penstock.learn.pack; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_the_learning_rate_rises_over_the_warm_up_and_then_stays() -> None:
    config = TrainWorkerConfig(lr=1.0, warmup_steps=4)
    assert [config.lr_at(step, 8) for step in range(1, 9)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_linear_schedule_would_reach_its_minimum_a_step_after_the_last_and_stays_there() -> None:
    config = TrainWorkerConfig(lr=1.0, schedule="linear", warmup_steps=1, min_lr_ratio=0.2)
    assert [config.lr_at(step, 5) for step in (1, 2, 3, 5, 6, 9)] == pytest.approx([1.0, 1.0, 0.8, 0.4, 0.2, 0.2])


def test_a_cosine_schedule_is_half_way_in_the_middle() -> None:
    config = TrainWorkerConfig(lr=2.0, schedule="cosine")
    assert [config.lr_at(step, 10) for step in (1, 6, 11)] == pytest.approx([2.0, 1.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_every_step_trains_and_the_schedules_are_those_of_transformers(schedule: str) -> None:
    config = TrainWorkerConfig.model_validate({"lr": 1.0, "schedule": schedule})
    assert config.lr_at(1, 1) == 1.0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=7)
    for step in range(1, 8):
        assert config.lr_at(step, 7) == pytest.approx(theirs.get_last_lr()[0])
        assert config.lr_at(step, 7) > 0
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", math.inf), ("lr", math.nan), ("lr", 1e400), ("eps", math.inf), ("max_grad_norm", math.inf),
        ("weight_decay", math.inf), ("updates_per_batch", 10**25), ("max_tokens_per_micro_batch", 10**25),
        ("warmup_steps", 10**25), ("min_lr_ratio", math.nan),
    ],
)  # fmt: skip
def test_every_number_has_a_finite_range(field: str, value: float) -> None:
    with pytest.raises((ConfigError, ValidationError), match=field):
        TrainWorkerConfig.model_validate({field: value})


def test_every_problem_of_a_configuration_is_named_at_once() -> None:
    config = TrainWorkerConfig(betas=(0.9, 1.0), advantage="gpro", loss=LossConfig(name="pppo", aggregation="constant"))
    with pytest.raises(ConfigError) as caught:
        config.check()
    problems = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    assert "betas is (0.9, 1.0)" in problems
    assert "Did you mean 'grpo'" in problems
    assert "Did you mean 'ppo'" in problems
    assert "constant_length" in problems
