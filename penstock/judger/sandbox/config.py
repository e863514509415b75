"""How code is kept in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pydantic

from penstock.config import Config

MiB = 1 << 20

Kind = Literal["auto", "bubblewrap", "namespaces", "limits"]


class SandboxConfig(Config):
    """Where code that a model wrote is run, and how much of everything it gets."""

    kind: Kind = "auto"
    """auto: the first that works here of bubblewrap, namespaces (the same without the program), limits (neither)."""
    python: str | None = None
    """The interpreter that runs the code, with the standard library only. None: this one, else `python3`."""
    paths: list[Path] = []
    """Directories whose modules the code may import besides."""
    warm: int = pydantic.Field(default=2, ge=0, le=256)
    """Sandboxes that are kept ready, so that a run does not wait for one to start."""
    max_running: int = pydantic.Field(default=4, ge=1, le=256)
    """Answers that are run at a time."""
    max_memory: int = pydantic.Field(default=512 * MiB, ge=64 * MiB)
    """Bytes, of one process and of all together."""
    max_processes: int = pydantic.Field(default=16, ge=1)
    """Threads count."""
    max_output: int = pydantic.Field(default=1 * MiB, ge=1)
    """Bytes that a run may print, or return."""
    max_files_bytes: int = pydantic.Field(default=64 * MiB, ge=1)
    """Of all files that a run writes."""
    start_timeout_s: float = pydantic.Field(default=20.0, gt=0, allow_inf_nan=False)
    """For a sandbox to be ready."""

    def problems(self) -> Iterator[str]:
        if self.kind == "bubblewrap" and shutil.which("bwrap") is None:
            yield "kind is 'bubblewrap' and there is no bwrap here; Debian's package is called bubblewrap"
        if self.python is not None and shutil.which(self.python) is None:
            yield f"python is {self.python!r}; there is no such program"
        for path in self.paths:
            if not path.is_dir():
                yield f"paths has {str(path)!r}, which is no directory"
