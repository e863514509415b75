"""How the tests run, whatever they test.

Property tests try the same examples every time: a failure is a change, never a coincidence. What is marked `sized` runs
in every tier, at its full size with `--full`; what is marked `long_tier` runs only there (`make test-long`).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How fast examples are made depends on what else the machine does.
settings.register_profile(
    "same", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
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
