"""Every number of every configuration has an end."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import penstock
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.learn.losses import LossConfig
from penstock.rollout import SampleParams

NOT_LIGHT = (
    "penstock.testing",
    "penstock.recipes",
    "penstock.cli",
    "penstock.engine.",
    "penstock.cluster",
    "penstock.view",
    "penstock.trainer.spans",
)
ENDLESS = [math.inf, -math.inf, math.nan, 10**25, -(10**25)]


def config_classes() -> list[type[Config]]:
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if module.name.endswith(".config") or (not module.name.startswith(NOT_LIGHT) and module.name.count(".") < 3):
            importlib.import_module(module.name)

    def below(base: type[Config]) -> Iterator[type[Config]]:
        for found in base.__subclasses__():
            yield found
            yield from below(found)

    ours = {found for found in below(Config) if found.__module__.startswith("penstock.")}
    # What the losses have in common is never made by itself.
    made = (found for found in ours if not inspect.isabstract(found) and found is not LossConfig)
    return sorted(made, key=lambda found: found.__name__)


def shapes(kind: Any) -> Iterator[Any]:
    """Around `0`, how a number can stand in a field of this type."""
    parts = typing.get_args(kind)
    if kind in (int, float):
        yield lambda number: number
    elif typing.get_origin(kind) is tuple and (int in parts or float in parts):
        yield lambda number: tuple(number for _ in parts)
    elif typing.get_origin(kind) is list and (int in parts or float in parts):
        yield lambda number: [number]
    elif typing.get_origin(kind) is dict and parts[1] in (int, float):
        yield lambda number: {"a": number}
    elif typing.get_origin(kind) not in (typing.Literal, dict, list, tuple):
        for part in parts:
            yield from shapes(part)


FIELDS = [
    pytest.param(found, name, shape, id=f"{found.__name__}.{name}")
    for found in config_classes()
    for name, field in found.model_fields.items()
    for shape in shapes(field.annotation)
]


def test_the_fields_with_numbers_are_found() -> None:
    found = {str(parameter.id) for parameter in FIELDS}
    assert len(found) > 90
    assert {
        "RLColocateTrainerConfig.total_steps",
        "RLDisaggregatedTrainerConfig.hf_interval",
        "SamplerConfig.prompt_repeat_k",
        "TrainWorkerConfig.betas",
        "RolloutControllerConfig.request_timeout_s",
        "ComposedJudgerConfig.weights",
    } <= found


@pytest.mark.parametrize(("config", "name", "shape"), FIELDS)
def test_a_number_without_end_is_refused_in_every_field(config: type[Config], name: str, shape: Any) -> None:
    others: dict[str, Any] = {"tasks": []} if "manager" in config.model_fields else {}
    for number in ENDLESS:
        with pytest.raises(ConfigError) as refused:
            config(**{name: shape(number)}, **others).check()
        assert any(name in problem and "is not a field" not in problem for problem in refused.value.problems), number


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens"])
@pytest.mark.parametrize("number", ENDLESS)
def test_a_number_without_end_is_refused_in_sampling(name: str, number: float) -> None:
    with pytest.raises(ValueError, match=f"SampleParams: .*{name} is "):
        SampleParams(**{name: number})  # type: ignore[arg-type]


class Freight(Config):
    containers: int = 0
    num_cranes: int = 0
    memory_of_crane: int = 0
    anything: Any = None


def test_what_a_number_may_be_depends_on_what_it_counts() -> None:
    Freight(containers=10**9, num_cranes=10**4, memory_of_crane=10**12, anything=10**40)
    with pytest.raises(ConfigError, match=r"Freight\.containers is 1000000001; it must be at most 1,000,000,000"):
        Freight(containers=10**9 + 1)
    with pytest.raises(ConfigError, match=r"Freight\.num_cranes is 10001; it must be at most 10,000"):
        Freight(num_cranes=10**4 + 1)
    with pytest.raises(ConfigError, match=r"Freight\.memory_of_crane is 10000000000000000; it must be at most"):
        Freight(memory_of_crane=10**16)
