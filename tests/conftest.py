"""How the tests run, whatever they test.

Property tests try the same examples every time: a failure is a change, never a coincidence. What is marked `sized` runs
in every tier, at its full size with `--full`; what is marked `long_tier` runs only there (`make test-long`).
"""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, database=None)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="sized tests at their full size")


@pytest.fixture(scope="session")
def full_size(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))
