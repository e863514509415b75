from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from view_runs import make_run

from penstock.view.runs import Runs
from penstock.view.server import COOKIE, make_app

TOKEN = "the-right-one"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "first")


@pytest.fixture
def token() -> str:
    return TOKEN


@pytest.fixture
def stranger(run_dir: Path) -> Iterator[TestClient]:
    """Somebody without the token."""
    with TestClient(make_app(Runs(run_dir.parent), TOKEN), follow_redirects=False) as client:
        yield client


@pytest.fixture
def client(stranger: TestClient) -> TestClient:
    stranger.cookies.set(COOKIE, TOKEN)
    return stranger
