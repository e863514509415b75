"""The public surface: what a run file may import from `penstock`."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import penstock


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_public_name_resolves_and_says_what_it_is(name: str) -> None:
    found = getattr(penstock, name)
    assert inspect.getdoc(found), f"penstock.{name} has no docstring"
    if inspect.isclass(found):
        assert found.__doc__, f"penstock.{name} has only the docstring of its base"


@pytest.mark.parametrize("package", ["penstock.trainer", "penstock.weights"])
def test_every_name_of_a_package_that_loads_them_late_resolves(package: str) -> None:
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_the_list_is_sorted_and_has_no_name_twice() -> None:
    assert penstock.__all__ == sorted(set(penstock.__all__))
    assert set(penstock.__all__) <= set(dir(penstock))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        penstock.Trainer  # noqa: B018


def test_using_every_name_imports_neither_torch_nor_ray() -> None:
    program = (
        "import sys\nfrom penstock import *\n"
        "heavy = sorted({'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules))\n"
        "assert not heavy, heavy\nassert RLColocateTrainerConfig and exact_match\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
