from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.agent_loop import SingleTurnAgentLoopConfig
from penstock.config import import_name
from penstock.data import AdditionConfig, SamplerConfig
from penstock.judger import NativeJudgerConfig, final_number
from penstock.learn import TrainWorkerConfig
from penstock.produce import AgentLoopManagerConfig, AsyncProduceStrategyConfig, TaskSpecConfig
from penstock.trainer.config import RLDisaggregatedTrainerConfig
from penstock.trainer.config_changes import (
    ABSENT,
    HARMLESS,
    Difference,
    config_differences,
    refused_differences,
    why_harmless,
)
from penstock.trainer.evaluator import EvaluatorConfig
from penstock.trainer.trackers import JsonlTrackerConfig


def addition(name: str) -> TaskSpecConfig:
    return TaskSpecConfig(
        task_name=name,
        sampler_config=SamplerConfig(dataset=AdditionConfig(), prompt_repeat_k=4),
        agent_loop_config=SingleTurnAgentLoopConfig(arguments={"own_timeout_s": 1}),
        judger_config=NativeJudgerConfig(reward_handler=final_number),
        produce_strategy_config=AsyncProduceStrategyConfig(),
    )


RUN = RLDisaggregatedTrainerConfig(
    model="tiny",
    manager=AgentLoopManagerConfig(tasks=[addition("addition")]),
    evaluator=EvaluatorConfig(tasks=[addition("held_out")]),
    total_steps=20,
    train_batch_size=4,
)
TASK = "manager.tasks.0"


def changed(path: str, value: Any, run: RLDisaggregatedTrainerConfig = RUN) -> list[str]:
    """The refused paths when a run that is in a file is resumed with one field changed."""
    saved = json.loads(json.dumps(run.describe(), default=repr))
    now = run.replace(path, value).describe()
    assert [found.path for found in config_differences(saved, now)] == [path]
    return [found.path for found in refused_differences(saved, now)]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model", "other"),
        ("seed", 1),
        ("deterministic", True),
        ("train_batch_size", 8),
        ("sync_weights_interval", 2),
        ("train.lr", 1e-3),
        ("train.advantage", "rloo"),
        ("train.loss.clip_high", 0.3),
        ("train.dtype", "bfloat16"),
        ("engines.engine.dtype", "bfloat16"),
        ("manager.failures.min_group_size", 2),
        (f"{TASK}.weight", 2.0),
        (f"{TASK}.sampler_config.prompt_repeat_k", 8),
        (f"{TASK}.sampler_config.dataset.seed", 9),
        (f"{TASK}.agent_loop_config.sample_params.temperature", 0.5),
        (f"{TASK}.agent_loop_config.arguments.own_timeout_s", 2),
        (f"{TASK}.produce_strategy_config.max_staleness", 3),
        (f"{TASK}.judger_config.version", "2"),
        ("evaluator.success_score", 0.5),
    ],
)
def test_what_changes_the_meaning_of_a_run_is_refused(path: str, value: Any) -> None:
    assert changed(path, value) == [path]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("total_steps", 40),
        ("eval_interval", 5),
        ("hf_interval", 5),
        ("trackers", [JsonlTrackerConfig()]),
        ("trackers.0.file", "other.jsonl"),
        ("cpu_threads", 1),
        ("engines.engine.max_running", 8),
        ("train.max_tokens_per_micro_batch", 64),
        ("sync_timeout_s", 1.0),
        ("manager.stall_timeout_s", 1.0),
        ("manager.failures.breaker_share", 1.0),
        (f"{TASK}.agent_loop_config.rollout_timeout_s", 1.0),
        (f"{TASK}.judger_config.timeout_s", 1.0),
        (f"{TASK}.judger_config.num_workers", 1),
        (f"{TASK}.agent_loop_config.num_ray_actors", 1),
    ],
)
def test_what_only_watches_waits_or_places_may_change(path: str, value: Any) -> None:
    assert changed(path, value) == []


@pytest.mark.parametrize("path", ["cpu_threads", "engines.engine.max_running", "train.max_tokens_per_micro_batch"])
def test_a_deterministic_run_may_not_change_its_rounding(path: str) -> None:
    assert changed(path, 32, RUN.replace("deterministic", True)) == [path]


def test_the_number_of_steps_may_change_only_while_the_learning_rate_does_not_depend_on_it() -> None:
    assert changed("total_steps", 40, RUN.replace("train", TrainWorkerConfig(schedule="cosine"))) == ["total_steps"]


def test_every_harmless_change_has_a_reason_and_a_field() -> None:
    fields = [found.path for found in config_differences({}, flat(RUN.describe()))]
    not_found = [pattern for pattern in HARMLESS if not any(fnmatchcase(field, pattern) for field in fields)]
    assert [pattern for pattern in not_found if not pattern.startswith("checkpoint_")] == []
    assert all(rule.reason for rule in HARMLESS.values())


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every dotted path of a described configuration, inner ones included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = {
        key: item for name, inner in items for key, item in flat(inner, f"{path}.{name}" if path else str(name)).items()
    }
    return {path: True, **below} if path else below


def test_differences_are_shown_with_their_path_and_both_values() -> None:
    old = {"a": {"b": 1}, "list": [1, 2], "gone": None, "nan": float("nan"), "tuple": (1, 2)}
    new = {"a": {"b": 2}, "list": [1, 2, 3], "more": 1, "nan": float("nan"), "tuple": [1, 2]}
    found = config_differences(old, new)
    assert found == [
        Difference("a.b", 1, 2),
        Difference("list", [1, 2], [1, 2, 3]),
        Difference("gone", None, ABSENT),
        Difference("more", ABSENT, 1),
    ]
    assert str(found[0]) == "a.b: 1 -> 2"
    assert why_harmless(found[0], old, new) is None


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
CONFIGS = st.dictionaries(st.sampled_from("abcd"), PLAIN, max_size=4)


@given(CONFIGS, CONFIGS)
def test_there_are_differences_exactly_when_the_files_would_differ(old: dict[str, Any], new: dict[str, Any]) -> None:
    same = json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True)
    assert (config_differences(old, new) == []) == same
    assert config_differences(old, old) == []
    assert {found.path for found in config_differences(old, new)} == {
        found.path for found in config_differences(new, old)
    }


FIRST_FORMAT = Path(__file__).parent / "data"


@pytest.mark.parametrize("recipe", ["tiny", "tiny_async"])
def test_a_run_that_the_first_format_described_can_be_resumed(recipe: str) -> None:
    saved = json.loads((FIRST_FORMAT / f"config_of_first_format_{recipe}.json").read_text())
    now = import_name(f"penstock.recipes.{recipe}.trainer")
    assert refused_differences(saved, now.describe()) == []
    changed = now.replace("train.lr", 0.5).replace("engines.engine.dtype", "bfloat16")
    refused = {difference.path for difference in refused_differences(saved, changed.describe())}
    assert refused == {"train.lr", "engines.engine.dtype"}
    of_training = EvaluatorConfig(tasks=[task.spec() for task in now.evaluator.tasks], greedy=now.evaluator.greedy)
    assert refused_differences(saved, now.replace("evaluator", of_training).describe()) == []


def test_a_field_that_a_description_lacks_differs_unless_it_has_its_default() -> None:
    now = RUN.describe()
    saved = {name: value for name, value in now.items() if name != "seed"}
    assert config_differences(saved, now) == []
    assert refused_differences(saved, RUN.replace("seed", 1).describe()) == [Difference("seed", ABSENT, 1)]


def test_tasks_for_short_are_described_as_the_tasks_of_the_manager() -> None:
    fields = {name: getattr(RUN, name) for name in RUN.model_fields_set if name != "manager"}
    short = RLDisaggregatedTrainerConfig(**fields, tasks=RUN.manager.tasks)
    assert short.describe() == RUN.describe() and "tasks" not in short.describe()
