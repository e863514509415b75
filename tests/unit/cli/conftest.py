from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_command import CONFIG


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with `mine.py`; what loading it leaves in the interpreter is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "mine.py").write_text(CONFIG)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").absolute().is_relative_to(tmp_path):
            del sys.modules[name]
