"""`command.json` in a run directory: what the command that began the run was given.

A resume takes the `--set`s from there, so that they need not be remembered; those it is given itself come after them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import ConfigError
from penstock.events import Event, RunBegan

FILE = "command.json"


def remembered_settings(run_dir: Path) -> list[str]:
    """The `--set`s of the run in this directory; none when it was not begun by the command."""
    path = run_dir / FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["set"]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}, which says what the run was begun with, cannot be read: {error!r}; remove it and give every --set"
        ) from error
    if not isinstance(settings, list) or not all(isinstance(setting, str) for setting in settings):
        raise ConfigError(f"{path} does not say what the run was begun with; remove it and give every --set")
    return settings


def joined(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Both, in order; of those for one key the last."""
    last: dict[str, str] = {}
    for setting in (*before, *now):
        key = setting.partition("=")[0]
        last.pop(key, None)
        last[key] = setting
    return list(last.values())


class CommandFile:
    """A sink that writes the file when the run begins: from then on the directory is this process's to write."""

    def __init__(self, run_dir: Path, config: str, settings: Sequence[str]) -> None:
        self._path = run_dir / FILE
        self._content = {"config": config, "set": list(settings)}

    def notice(self, event: Event) -> None:
        if isinstance(event, RunBegan):
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._content, indent=2) + "\n", encoding="utf-8")
            new.replace(self._path)

    def close(self) -> None:
        pass
