"""Configuration of the replay buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.replay.buffer import ReplayBuffer
from penstock.replay.disk import Disk
from penstock.replay.ledger import Ledger
from penstock.replay.shelf import Order
from penstock.replay.storage import MemoryStorage


class ReplayBufferConfig(Config):
    """Where groups wait for training, and in which order."""

    order: Order = "fifo"
    """Which completed group is trained first: the first drawn, or the one that expires first."""
    storage: Literal["memory", "sqlite"] = "memory"
    """`sqlite` survives the process: a restart goes on from the run directory's ledger. `memory` cannot be resumed."""

    def build(self, run_dir: Path | None = None, *, disk: Disk | None = None) -> ReplayBuffer:
        """With `sqlite` the ledger is opened or begun; one that holds groups must then be restored.

        Raises LedgerError when it is held by another process, damaged, or of another format.
        """
        if self.storage == "memory":
            return ReplayBuffer(order=self.order, storage=MemoryStorage(run_dir))
        if run_dir is None:
            raise ConfigError("ReplayBufferConfig.storage is 'sqlite', which needs a run directory; none was given")
        return ReplayBuffer(order=self.order, storage=Ledger.open(run_dir, disk=disk))
