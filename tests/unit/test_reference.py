"""`docs/reference.md` and `docs/metrics.md` are what the code says, all of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from penstock.config import Config
from penstock.trainer.metric_names import METRICS, meaning, unit

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(maker: ModuleType) -> str:
    made: str = maker.page()
    return made


@pytest.fixture(scope="module")
def sources() -> str:
    """All of the package, but the list of metrics."""
    files = (path for path in (ROOT / "penstock").rglob("*.py") if path.name != "metric_names.py")
    return "\n".join(path.read_text() for path in files)


def test_the_pages_are_what_the_code_makes_of_it(maker: ModuleType, page: str) -> None:
    assert maker.PAGE.read_text() == page, "run `make reference`"
    assert maker.METRICS_PAGE.read_text() == maker.metrics_page(), "run `make reference`"


def test_every_field_is_on_the_page_and_says_what_it_is(maker: ModuleType, page: str) -> None:
    missing, silent = [], []
    for cls in maker.configurations():
        part = page.partition(f"\n### {cls.__name__}\n")[2].partition("\n### ")[0]
        for name in cls.__annotations__:
            if name in cls.model_fields:
                missing += [f"{cls.__name__}.{name}"] if f"| `{name}` |" not in part else []
                silent += [f"{cls.__name__}.{name}"] if not maker.doc_of(cls, name) else []
    assert missing == [] and silent == []


def test_every_configuration_of_the_package_is_on_the_page(maker: ModuleType) -> None:
    files = (
        path for path in (ROOT / "penstock").rglob("*.py") if "cli" not in path.parts and "recipes" not in path.parts
    )
    defined = {name for path in files for name in re.findall(r"^class (\w+)\(.*Config.*\):", path.read_text(), re.M)}
    assert {cls.__name__ for cls in maker.configurations()} == {name for name in defined if name.endswith("Config")}
    assert all(issubclass(cls, Config) for cls in maker.configurations())


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_every_metric_that_is_explained_is_made_somewhere(metric: str, sources: str) -> None:
    if metric.endswith("<figure>"):
        return  # another one's, said of a part
    last = next(part for part in reversed(re.split(r"<[^>]+>|/", metric)) if part)
    assert last in sources


def test_every_metric_has_a_unit() -> None:
    units = {name: unit(name) for name in METRICS}
    assert units["tokens/generated_per_s"] == "tokens a second" and units["tokens/wasted"] == "tokens"
    assert units["train/seconds/<part>"] == units["time/step_s"] == "seconds"
    assert units["train/mismatch/ess"] == units["length/truncated_share"] == "share, 0 to 1"
    assert units["train/mismatch/ratio_max"] == units["train/ratio/max"] == "ratio"
    with pytest.raises(KeyError, match="has no unit"):
        unit("something/else")


def test_a_metric_of_a_run_is_found_by_its_pattern() -> None:
    assert meaning("reward/mean") == METRICS["reward/mean"]
    assert meaning("produce/reverse/discarded/failed") == METRICS["produce/<task>/discarded/<reason>"]
    assert meaning("eval/greedy_pass@4") == METRICS["eval/pass@<k>"]
    assert meaning("staleness/tokens_3") == METRICS["staleness/tokens_<n>"]
    assert meaning("something/else") is None
