"""How the tests run, whatever they test.

Property tests try the same examples every time: a failure is a change, never a coincidence. What is marked `sized` runs
in every tier, at its full size with `--full`; what is marked `long_tier` runs only there (`make test-long`).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import find, settings
from hypothesis import strategies as st

settings.register_profile("same", derandomize=True, database=None)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="sized tests at their full size")


@pytest.fixture(scope="session")
def full_size(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all test processes of a session, so that the tiny model is made once."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "penstock-models"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(scope="session", autouse=True)
def _first_values_are_drawn() -> None:
    """In a fresh clone the first values take seconds: what Hypothesis keeps in `.hypothesis` is made for them.

    Drawn before the first test, that is not taken for a slow strategy of whichever test draws first.
    """
    find(st.text() | st.integers() | st.floats(), lambda value: isinstance(value, str))
