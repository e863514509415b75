import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import get_scheduler

from penstock.errors import ConfigError
from penstock.learn import (
    CorrectionConfig,
    CustomLossConfig,
    GSPOLossConfig,
    KLConfig,
    LossConfig,
    OverlongConfig,
    PPOLossConfig,
    TrainWorkerConfig,
)


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
    config = TrainWorkerConfig(
        betas=(0.9, 1.0),
        advantage="gpro",
        loss=PPOLossConfig(aggregation="constant"),
        correction=CorrectionConfig(
            bypass_mode=True, rollout_is="token", rollout_rs="seq_k1", rollout_rs_threshold=2.0
        ),
    )
    with pytest.raises(ConfigError) as caught:
        config.check()
    problems = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    assert "betas is (0.9, 1.0)" in problems
    assert "Did you mean 'grpo'" in problems
    assert "would apply it twice" in problems
    assert "constant_length" in problems
    assert "rollout_rs has 'seq_k1'" in problems


def test_a_word_stands_for_a_loss_or_a_correction_and_a_path_for_a_function() -> None:
    config = TrainWorkerConfig(loss="gspo", correction="icepop")
    assert config.loss == GSPOLossConfig() and config.correction.rollout_is_threshold == "0.5_5.0"
    custom = config.replace("loss", "penstock.learn.losses.ppo").loss
    assert isinstance(custom, CustomLossConfig) and custom.function == "penstock.learn.losses.ppo"
    with pytest.raises(ConfigError, match="Did you mean 'ppo'"):
        TrainWorkerConfig(loss="pppo")
    with pytest.raises(ConfigError, match="Did you mean 'icepop'"):
        TrainWorkerConfig(correction="icepops")


def test_the_class_that_losses_have_in_common_is_no_loss() -> None:
    with pytest.raises(ConfigError, match="give PPOLossConfig"):
        LossConfig(name="ppo")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rollout_is": "token", "rollout_is_threshold": "5.0_0.5"}, "the low end must be"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, "'two' is not a number"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.0}, "must be above 0"),
        ({"rollout_rs": "token_k1"}, "0 values"),
        ({"rollout_rs": "token_k1,seq_sum_k3", "rollout_rs_threshold": "0.5_2.0"}, "1 values"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2.0}, "Did you mean 'token_k"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "must be above 1"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs says not by what"),
        ({"rollout_is_threshold": 5.0}, "rollout_is asks for no weights"),
    ],
)
def test_a_threshold_that_means_nothing_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        CorrectionConfig(**fields).check()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kl": KLConfig(coef=0.1, place="reward")}, "kl.place='reward' takes from them"),
        ({"overlong": OverlongConfig(buffer_tokens=2)}, "overlong.buffer_tokens takes from them"),
    ],
)
def test_a_rate_of_success_is_refused_where_scores_fall_below_0(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TrainWorkerConfig(advantage="maxrl", **fields).check()
    TrainWorkerConfig(advantage="maxrl", kl=KLConfig(coef=0.1), overlong=OverlongConfig(mask_truncated=True)).check()


def test_discounting_is_refused_for_estimators_that_do_not() -> None:
    TrainWorkerConfig(gamma=0.9, advantage="reinforce_plus_plus").check()
    with pytest.raises(ConfigError, match="rloo gives every token of an answer the same"):
        TrainWorkerConfig(gamma=0.9, advantage="rloo").check()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"min_lr_ratio": 0.1}, "min_lr_ratio is 0.1; schedule is 'constant'"),
        ({"advantage": "none", "kl": KLConfig(coef=0.1, place="reward")}, "kl.place is 'reward' and advantage"),
        (
            {"advantage": "none", "overlong": OverlongConfig(buffer_tokens=8)},
            "buffer_tokens is 8 and advantage",
        ),
        ({"overlong": OverlongConfig(mask_truncated=True, penalty=2.0)}, "buffer_tokens is None: length"),
        (
            {"overlong": OverlongConfig(mask_truncated=True, max_tokens=9)},
            "buffer_tokens is None: length",
        ),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TrainWorkerConfig(**fields).check()
