"""A store in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.trainer.checkpoints import CheckpointStore

from .stores import Store, UnflushedFiles


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # In memory where there is such a place: thousands of small files are rewritten here.
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else tmp_path_factory.mktemp("checkpoints")
    with tempfile.TemporaryDirectory(dir=where) as directory:
        yield Path(directory)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return Store(tmp_path / "checkpoints", files=UnflushedFiles())
