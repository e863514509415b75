"""Where a run begins: fresh, or where an earlier process of it was stopped, killed or crashed.

A run is resumed from a checkpoint and the ledger, and from nothing else. It never starts again from step 0 by itself:
what cannot be resumed is refused, with the reason.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import CheckpointError, RefusedError
from penstock.replay import ReplayBuffer
from penstock.replay.ledger import LOCK_FILE, has_ledger
from penstock.replay.lock import check_free
from penstock.trainer.checkpoints import Checkpoint, CheckpointStore
from penstock.trainer.config_changes import config_differences, refused_differences

NEWEST = "newest"
AUTO = "auto"


class Beginning(msgspec.Struct, frozen=True):
    checkpoint: Checkpoint | None = None
    """None for a fresh run."""
    notes: list[str] = []
    """What to tell the user: checkpoints that were passed over, settings that changed."""
    newest: int | None = None
    """The step of the newest checkpoint there was, whole or not."""


def find_beginning(run_dir: Path, resume: str | None, config: dict[str, Any], store: CheckpointStore) -> Beginning:
    """`resume` is None (a new run), `newest`, `auto` (newest, or a new run where none was begun), or a checkpoint.

    Reads only. Raises RefusedError when the directory is taken, LedgerError when another process uses it, and
    CheckpointError when nothing can be resumed or the configuration changed in a way that would change the run's
    meaning.
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
    if resume not in (NEWEST, AUTO) and Path(resume).resolve().parent != store.directory.resolve():
        raise CheckpointError(f"{resume} is not a checkpoint of this run; those are in {store.directory}")
    checkpoint = store.newest() if resume in (NEWEST, AUTO) else store.open(Path(resume))
    refused = refused_differences(checkpoint.config, config)
    if refused:
        raise CheckpointError(
            [f"{checkpoint.path}: the configuration changed, and with it what the run means; change it back"]
            + [f"  {difference}" for difference in refused]
        )
    changed = [f"changed: {difference}" for difference in config_differences(checkpoint.config, config)]
    skipped = [f"checkpoint passed over: {problem}" for problem in checkpoint.skipped]
    notes = [*skipped, *changed, f"resuming from {checkpoint.path}"]
    return Beginning(checkpoint, notes, max(store.steps()))


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
