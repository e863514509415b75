"""Where a run begins: fresh, or where an earlier process of it was stopped, killed or crashed.

A run is resumed from a checkpoint and the ledger, and from nothing else. It never starts again from step 0 by itself:
what cannot be resumed is refused, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import nearest
from penstock.errors import CheckpointError, RefusedError
from penstock.replay import ReplayBuffer
from penstock.replay.ledger import has_ledger
from penstock.replay.lock import LOCK_FILE, check_free
from penstock.trainer.checkpoints import Checkpoint, CheckpointStore
from penstock.trainer.config_changes import (
    NEVER,
    config_differences,
    harmless_fields,
    has_field,
    refused_differences,
)

NEWEST = "newest"
AUTO = "auto"


class Beginning(msgspec.Struct, frozen=True):
    checkpoint: Checkpoint | None = None
    """None for a fresh run."""
    notes: list[str] = []
    """What to tell the user: checkpoints that were passed over, settings that changed."""
    newest: int | None = None
    """The step of the newest checkpoint there was, whole or not."""


def find_beginning(
    run_dir: Path,
    resume: str | None,
    config: dict[str, Any],
    store: CheckpointStore,
    *,
    allow_change: Sequence[str] = (),
) -> Beginning:
    """`resume` is None (a new run), `newest`, `auto` (newest, or a new run where none was begun), or a checkpoint: its
    name or its path.

    Reads only. Raises RefusedError when the directory is taken, LedgerError when another process uses it, and
    CheckpointError when nothing can be resumed or the configuration changed in a way that would change the run's
    meaning, unless the field, or one above it, is in `allow_change`.
    """
    begun = has_ledger(run_dir)
    # Now, not when the ledger is opened: by then the model is loaded, and the files that were read may be moving.
    check_free(run_dir / LOCK_FILE)
    if resume is None:
        if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
            hint = "add --resume to continue it, or name another with --run-dir" if begun else "use another --run-dir"
            raise RefusedError(f"run directory {run_dir} is not empty; {hint}")
        _check_writable(run_dir)
        return Beginning()
    if not begun:
        if resume == AUTO and not store.steps():
            return Beginning()
        if store.steps():
            raise CheckpointError(f"{run_dir}: there are checkpoints of a run, but its ledger is gone")
        raise CheckpointError(f"{run_dir}: no run was begun there; without --resume, or with --resume auto, one is")
    if resume in (NEWEST, AUTO) and not store.steps():
        # Killed before checkpoint 0: nothing was drawn, which is checked when the ledger is opened.
        return Beginning(notes=["the earlier process was stopped before anything was drawn; the run begins now"])
    checkpoint = store.newest() if resume in (NEWEST, AUTO) else store.open(_named(resume, store))
    _check_changes(checkpoint, config, allow_change)
    changed = [f"changed: {difference}" for difference in config_differences(checkpoint.config, config)]
    skipped = [f"checkpoint passed over: {problem}" for problem in checkpoint.skipped]
    notes = [*skipped, *changed, f"resuming from {checkpoint.path}"]
    return Beginning(checkpoint, notes, max(store.steps()))


def _named(resume: str, store: CheckpointStore) -> Path:
    """The checkpoint that was asked for, by its name or its path."""
    path = store.directory / resume if Path(resume).name == resume else Path(resume)
    there = [checkpoint.name for checkpoint in store.retained()]
    if path.name not in there or path.resolve().parent != store.directory.resolve():
        listed = (
            f"there are {', '.join(there)}, in {store.directory}" if there else f"there is none in {store.directory}"
        )
        raise CheckpointError(f"{resume!r} is not a checkpoint of this run; {listed}")
    return path


def _check_changes(checkpoint: Checkpoint, config: dict[str, Any], allow_change: Sequence[str]) -> None:
    refused = refused_differences(checkpoint.config, config)
    changed = [found.path for found in refused]
    problems = [
        f"--allow-change {path}: there is no such field.{nearest(path, changed)}"
        for path in allow_change
        if not has_field(checkpoint.config, path) and not has_field(config, path)
    ]
    problems += [f"{found}: {NEVER[found.path]}" for found in refused if found.path in NEVER]
    left = [found for found in refused if not any(_covers(path, found.path) for path in allow_change)]
    left = [found for found in left if found.path not in NEVER]
    if left:
        problems += [
            f"{checkpoint.path}: the configuration changed, and with it what the run means:",
            *(f"  {found}" for found in left),
            f"change it back, or go on with it: {' '.join(f'--allow-change {found.path}' for found in left)}",
            "what may change without that:",
            *(f"  {', '.join(fields)}: {reason}" for reason, fields in harmless_fields().items()),
        ]
    if problems:
        raise CheckpointError(problems)


def _covers(path: str, field: str) -> bool:
    return field == path or field.startswith(f"{path}.")


def require_unchanged(beginning: Beginning, run_dir: Path, buffer: ReplayBuffer, store: CheckpointStore) -> None:
    """To be called when the ledger is held: what was found before must still be there, and nothing new.

    Between the two another process may have begun a run there, and ended it. Raises CheckpointError.
    """
    checkpoint, steps = beginning.checkpoint, store.steps()
    if checkpoint is None and (buffer.position or steps):
        if steps:
            raise CheckpointError(f"{run_dir}: another process began a run there meanwhile; use another --run-dir")
        raise CheckpointError(f"{run_dir}: its ledger holds groups, but there is no checkpoint left")
    if checkpoint is not None and (checkpoint.step not in steps or max(steps) != beginning.newest):
        raise CheckpointError(f"{run_dir}: another process went on with the run meanwhile; try again")


def _check_writable(run_dir: Path) -> None:
    """Nothing is made yet: the nearest directory that exists must take new ones."""
    parent = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RefusedError(f"run directory {run_dir} cannot be made: {parent} is not a directory one can write to")
