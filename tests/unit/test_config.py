from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from penstock.config import Config, import_name
from penstock.engine import EmbeddedEngineConfig
from penstock.errors import ConfigError
from penstock.learn import TrainWorkerConfig
from penstock.rollout import SampleParams


class Wheel(Config):
    size: int = pydantic.Field(default=10, ge=1)
    spokes: int = 20

    def problems(self) -> Iterator[str]:
        if self.spokes > self.size * 4:
            yield f"spokes is {self.spokes}; a wheel of {self.size} has at most {self.size * 4}"


class Bicycle(Config):
    wheels: list[Wheel] = [Wheel(), Wheel()]
    params: SampleParams = SampleParams()
    named: dict[str, Wheel] = {}
    bell: Any = None


def test_an_unknown_key_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(ConfigError, match=r"Wheel\.spoks is not a field\. Did you mean 'spokes'\?"):
        Wheel(spoks=3)


def test_every_problem_of_a_call_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError) as refused:
        Wheel(size=0, spokes="many", colour="red")
    assert len(refused.value.problems) == 3
    assert all("test_config.py:" in problem for problem in refused.value.problems)


def test_a_config_cannot_be_written() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Wheel().size = 3


def test_checking_finds_the_problems_of_all_parts_at_once() -> None:
    bicycle = Bicycle(wheels=[Wheel(spokes=50), Wheel(size=1)], named={"spare": Wheel(spokes=99)})
    with pytest.raises(ConfigError) as refused:
        bicycle.check()
    assert [problem.split(":")[0] for problem in refused.value.problems] == ["wheels.0", "wheels.1", "named.spare"]


def test_a_good_config_is_not_refused() -> None:
    Bicycle().check()


@pytest.mark.parametrize(
    ("path", "value"), [("wheels.1.spokes", 7), ("params.max_tokens", 7), ("named.spare.size", 7), ("bell", 7)]
)
def test_a_field_at_a_dotted_path_can_be_replaced_in_a_copy(path: str, value: int) -> None:
    bicycle = Bicycle(named={"spare": Wheel()})
    found: Any = bicycle.replace(path, value)
    for part in path.split("."):
        found = found[int(part)] if part.isdigit() else found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    assert bicycle == Bicycle(named={"spare": Wheel()})


def test_true_is_not_a_number() -> None:
    with pytest.raises(ConfigError, match=r"TrainWorkerConfig\.updates_per_batch is True; it must be a number"):
        TrainWorkerConfig(updates_per_batch=True)
    with pytest.raises(ConfigError, match=r"EmbeddedEngineConfig\.max_context is False; it must be a number"):
        EmbeddedEngineConfig(max_context=False)
    assert EmbeddedEngineConfig(fused=False, max_context=None).max_context is None


def test_replacing_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Wheel has no 'spoke'\. Did you mean 'spokes'\?"):
        Bicycle().replace("wheels.0.spoke", 3)


def test_a_replaced_value_is_checked_like_any_other() -> None:
    with pytest.raises(ConfigError, match="size is 0"):
        Bicycle().replace("wheels.0.size", 0)


def test_a_description_is_plain_data_that_names_classes_and_functions() -> None:
    described = Bicycle(wheels=[], bell=import_name).describe()
    assert described["class"] == "Bicycle"
    assert described["bell"] == "penstock.config.import_name"
    assert described["params"]["max_tokens"] == 256
    assert Bicycle(bell=Path("/a")).describe()["bell"] == "/a"


class Bell:
    def __init__(self, tone: str) -> None:
        self.tone = tone
        self.lock = threading.Lock()

    def __call__(self) -> str:
        return self.tone


@pytest.mark.parametrize(
    "make",
    [
        lambda: functools.partial(import_name, "a.b", strict={"y", "x"}),
        lambda: Bell("high"),
        lambda: {"cc", "a", "bb", "d"},
        lambda: object(),
        lambda: [threading.Lock(), functools.partial(Bell("low"))],
    ],
)
def test_a_description_is_the_same_in_every_process(make: Callable[[], Any]) -> None:
    before, now = make(), make()
    described = json.dumps(Bicycle(bell=before).describe())
    assert described == json.dumps(Bicycle(bell=now).describe())
    assert "0x" not in described


def test_a_description_tells_what_a_partial_and_a_callable_object_were_given() -> None:
    described = Bicycle(bell=functools.partial(import_name, "a.b", strict={"y", "x"})).describe()["bell"]
    assert described == {
        "class": "partial(penstock.config.import_name)",
        "args": ["a.b"],
        "keywords": {"strict": ["x", "y"]},
    }
    assert Bicycle(bell=Bell("high")).describe()["bell"] == {"class": f"{__name__}.Bell", "tone": "high"}


def test_a_name_that_cannot_be_imported_is_refused() -> None:
    assert import_name("penstock.config:import_name") is import_name
    with pytest.raises(ConfigError, match="no_such_thing"):
        import_name("penstock.config.no_such_thing")
