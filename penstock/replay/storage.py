"""What the replay buffer decides is kept here.

Transitions arrive in order and any prefix of them is a consistent state, so a storage may write late and in groups.
`flush` is the barrier: what was recorded before it survives this process.
"""

from __future__ import annotations

from typing import Protocol

from penstock.replay.lifecycle import Transition
from penstock.rollout import Group


class Storage(Protocol):
    def record(self, transition: Transition, group: Group | None = None, cursor: int | None = None) -> None:
        """Take one transition, with the group's content when it changed and the sampler's cursor when it was drawn.

        Never blocks. Raises StorageError once a write has failed.
        """
        ...

    async def flush(self) -> None:
        """Returns when everything recorded so far is durable."""
        ...

    async def close(self) -> None: ...


class MemoryStorage:
    """Keeps nothing beyond this process: the buffer itself is the state."""

    def record(self, transition: Transition, group: Group | None = None, cursor: int | None = None) -> None:
        pass

    async def flush(self) -> None:
        pass

    async def close(self) -> None:
        pass
