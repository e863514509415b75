"""Where a run is kept: a directory of its own for each, numbered when the name is taken."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import ConfigError


def next_free(directory: Path) -> Path:
    """The directory itself, or `-2`, `-3`, ... when it is taken."""
    candidate, number = directory, 1
    while candidate.is_file() or is_taken(candidate):
        number += 1
        candidate = _named(directory).with_name(f"{_named(directory).name}-{number}")
    return candidate


def newest(directory: Path) -> Path:
    """The one with the highest number that is taken; the directory itself when none is."""
    pattern = re.compile(re.escape(directory.name) + r"-([2-9]|[1-9]\d+)")
    try:
        beside = [
            (int(found[1]), path) for path in directory.parent.iterdir() if (found := pattern.fullmatch(path.name))
        ]
    except OSError:
        beside = []
    taken = [path for _, path in sorted(beside, reverse=True) if path.is_dir() and is_taken(path)]
    return taken[0] if taken else directory


def is_taken(directory: Path) -> bool:
    try:
        return any(directory.iterdir())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"run directory {directory} cannot be used: {error}") from error


def given_directory(option: str, text: str) -> Path:
    """What was written for an option. Raises ConfigError when that is nothing: it would be the working directory."""
    if not text.strip():
        raise ConfigError(f"{option} is empty; name a directory, or leave {option} out")
    return Path(text)


def _named(directory: Path) -> Path:
    """One whose last part is a name: `.` and `..` have none of their own."""
    return directory if directory.name not in ("", "..") else directory.resolve()
