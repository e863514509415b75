import subprocess
import sys

import pytest

from penstock.errors import ConfigError
from penstock.learn.config import LossConfig, TrainWorkerConfig


def test_importing_the_configuration_and_the_batch_imports_no_torch() -> None:
    code = "import sys, penstock.learn.config, penstock.learn.batch, penstock.learn.pack; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_the_learning_rate_rises_over_the_warm_up_and_then_stays() -> None:
    config = TrainWorkerConfig(lr=1.0, warmup_steps=4)
    assert [config.lr_at(step, 8) for step in range(1, 9)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_linear_schedule_ends_at_its_minimum_and_stays_there() -> None:
    config = TrainWorkerConfig(lr=1.0, schedule="linear", warmup_steps=1, min_lr_ratio=0.2)
    assert [config.lr_at(step, 5) for step in (1, 2, 3, 5, 9)] == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])


def test_a_cosine_schedule_is_half_way_in_the_middle() -> None:
    config = TrainWorkerConfig(lr=2.0, schedule="cosine")
    assert [config.lr_at(step, 10) for step in (5, 10)] == pytest.approx([1.0, 0.0], abs=1e-12)


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
