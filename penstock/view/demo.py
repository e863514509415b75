"""The recorded run of `penstock view --demo`: a small `tiny-async` with a filter."""

from __future__ import annotations

import contextlib
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ARCHIVE = Path(__file__).parent / "demo.zip"


@contextlib.contextmanager
def demo_run() -> Iterator[Path]:
    """Its directory, until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as directory:
        with zipfile.ZipFile(ARCHIVE) as archive:
            archive.extractall(directory)
        yield Path(directory) / "demo"
