"""How the tests run, whatever they test.

Property tests try the same examples every time: a failure is a change, never a coincidence. What is marked `sized` runs
small in `make test` and at its full size in `make test-long`; what is marked `long_tier` runs in the second alone.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import find, settings
from hypothesis import strategies as st

SIZES = ("small", "full")

# A job in a shell's background, or under nohup, ignores these, and so would everything that a test starts and signals.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# How long an example takes is the machine's affair as much as the code's: that is a benchmark, not a test.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--size", choices=SIZES, default=SIZES[0], help="of the tests that are marked sized")


@pytest.fixture(scope="session")
def size(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """How much a sized test does: `size(small, full)`."""
    full_size = request.config.getoption("--size") == "full"
    return lambda small, full: full if full_size else small


@pytest.fixture
def computing_with() -> Iterator[Callable[[int], None]]:
    """`computing_with(2)`: torch has so many threads until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of a session, so that a small model is made once. Commands find it in PENSTOCK_HOME, its
    parent."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "penstock" / "models"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def make_known(model_cache: Path) -> Callable[[str], Path]:
    """A small model by its name: made by the first process that wants it, while the others wait."""

    def make(name: str) -> Path:
        from penstock.models import resolve_model

        with (model_cache / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return resolve_model(name, cache=model_cache)

    return make


@pytest.fixture(scope="session", autouse=True)
def _first_values_are_drawn() -> None:
    """In a fresh clone the first values take seconds: what Hypothesis keeps in `.hypothesis` is made for them.

    Drawn before the first test, that is not taken for a slow strategy of whichever test draws first.
    """
    find(st.text() | st.integers() | st.floats(), lambda value: isinstance(value, str))
