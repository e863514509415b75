"""What the replay buffer decides is kept here.

Transitions arrive in order and any prefix of them is a consistent state, so a storage may write late and in groups.
`flush` is the barrier: what was recorded before it survives this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from penstock.ports import FinishedTurn
from penstock.replay.lifecycle import Transition
from penstock.replay.lock import lock_directory
from penstock.replay.restore import Snapshot
from penstock.rollout import Group


class Storage(Protocol):
    @property
    def position(self) -> int:
        """How many transitions were ever recorded."""
        ...

    def load(self, checkpoint_step: int, position: int | None = None) -> Snapshot:
        """What a restart from `checkpoint_step` begins with. `position` is the one its checkpoint was written at."""
        ...

    def record(self, transition: Transition, group: Group | None = None, cursor: int | None = None) -> None:
        """Take one transition, with the group's content when it changed and the sampler's cursor when it was drawn.

        Never blocks. Raises StorageError once a write has failed.
        """
        ...

    def record_turn(self, sequence: int, turn: FinishedTurn) -> None:
        """Take a finished turn of the RUNNING group that was drawn as number `sequence`, in order with its transitions.

        It is kept until the group leaves RUNNING. Never blocks. Raises like `record`.
        """
        ...

    async def flush(self) -> None:
        """Returns when everything recorded so far is durable."""
        ...

    async def prune(self, oldest_retained_checkpoint_step: int) -> None:
        """Drop the contents that no restart from this step or a later one can need."""
        ...

    async def close(self) -> None: ...


class MemoryStorage:
    """Keeps nothing beyond this process: the buffer itself is the state. With a run directory it holds its lock."""

    position = 0

    def __init__(self, run_dir: Path | None = None) -> None:
        """Raises LedgerError when another process uses the directory, StorageError when it cannot be written."""
        self._lock = lock_directory(run_dir) if run_dir is not None else None

    def load(self, checkpoint_step: int, position: int | None = None) -> Snapshot:
        return Snapshot()

    def record(self, transition: Transition, group: Group | None = None, cursor: int | None = None) -> None:
        pass

    def record_turn(self, sequence: int, turn: FinishedTurn) -> None:
        pass

    async def flush(self) -> None:
        pass

    async def prune(self, oldest_retained_checkpoint_step: int) -> None:
        pass

    async def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
