"""What one train rank does, in whatever process it is: see `ranks` for where that is and who tells it to.

    open_store      the first rank alone: the others will find each other there
    join            meet the others, load the model, share it if it is to be shared
    train ...       each call is made on every rank; what they do together ends on all of them or on none

Synchronous. Every call but `stop` comes from one thread.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from penstock.config import from_plain
from penstock.errors import CheckpointError, StorageError, WeightSyncError
from penstock.garbage import keep_what_is_loaded
from penstock.learn.batch import TrainBatch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.learner import Learner
from penstock.learn.peers import Alone, Peers, ProcessGroupPeers
from penstock.learn.rng import restore_rng_tensors, rng_tensors
from penstock.learn.rounds import PeerFailed, Stopped
from penstock.learn.save import write_tensors
from penstock.learn.step_metrics import StepReport
from penstock.rollout import FloatArray
from penstock.unbuffered import FileSum
from penstock.weights.broadcast import join_store, open_store
from penstock.weights.channel import Writer, WriterSettings, build_writer
from penstock.weights.stored import StoredWeights

RNG = "rng/"

StatePart = Literal["weights", "rng"]
"""Of a rank's state; `weights` with the optimiser."""


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank is made from."""

    config: dict[str, Any]
    """A `TrainWorkerConfig` as plain data."""
    model_dir: str
    total_steps: int
    deterministic: bool = False
    threads: int | None = None
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Which of the ranks of its machine it is: the number of its device."""
    timeout_s: float = 600.0
    """For one exchange between the ranks."""
    paths: tuple[str, ...] = ()
    """Where modules of the user's are found: a loss, given by name."""


class Rank:
    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._store: Any = None
        self._joined: Learner | None = None
        self._writer: tuple[WriterSettings, Writer] | None = None
        self._stopped = 0
        """The last attempt that was asked to stop."""

    # Beginning.

    def open_store(self, address: str) -> int:
        """Listen on this address; returns the port."""
        self._store = open_store(address, self._setup.timeout_s)
        port: int = self._store.port
        return port

    def join(self, address: str, port: int) -> None:
        """Returns when all ranks have the model. Raises ModelError when it cannot be trained."""
        setup = self._setup
        sys.path += [path for path in setup.paths if path not in sys.path]
        config: TrainWorkerConfig = from_plain(setup.config)
        device = _own_device(config.device, setup.local_rank)
        self._joined = Learner(
            config.model_copy(update={"device": str(device)}),
            Path(setup.model_dir),
            total_steps=setup.total_steps,
            deterministic=setup.deterministic,
            threads=setup.threads,
            peers=self._meet(config, device, address, port),
        )
        keep_what_is_loaded()

    def _meet(self, config: TrainWorkerConfig, device: torch.device, address: str, port: int) -> Peers:
        setup = self._setup
        if setup.size == 1 and config.sharding == "none":
            return Alone()
        if self._store is None:
            self._store = join_store(address, port, setup.timeout_s)
        if (interface := _interface_towards(address, port)) is not None:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, interface)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=self._store,
            rank=setup.rank,
            world_size=setup.size,
            timeout=timedelta(seconds=setup.timeout_s),
        )
        return ProcessGroupPeers(device)

    # Training.

    def train(self, batch: TrainBatch, attempt: int) -> StepReport | None:
        """None when the step was stopped, or another rank could not make it; nothing has changed then.

        Raises like `Learner.train`.
        """
        try:
            return self._learner.train(batch, _StopAfter(self, attempt))
        except (Stopped, PeerFailed):
            return None

    def stop(self, attempt: int) -> None:
        """Of any thread: end this attempt before its next micro-batch, if it has not ended yet."""
        self._stopped = max(self._stopped, attempt)

    def score(self, batch: TrainBatch) -> dict[str, list[FloatArray]]:
        return self._learner.score(batch)

    def score_reference(self, batch: TrainBatch) -> dict[str, list[FloatArray]]:
        return self._learner.score_reference(batch)

    # State.

    def save(self, directory: str) -> dict[str, FileSum]:
        """What this rank has to write of a checkpoint: its files. Raises StorageError."""
        path = Path(directory) / self._rng_file
        try:
            written = write_tensors(path, rng_tensors())
        except OSError as error:
            raise StorageError(f"rank {self._setup.rank}: {path} could not be written: {error}") from error
        return {path.name: written} | self._learner.save(Path(directory))

    def load(self, directory: str) -> None:
        """Of a checkpoint of any number of ranks. Random numbers go on where a rank of this number left them."""
        self._learner.load(Path(directory))
        path = Path(directory) / self._rng_file
        if path.exists():
            try:
                restore_rng_tensors(load_file(path))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be loaded: {error}") from error

    def save_hf(self, directory: str) -> None:
        self._learner.save_hf(Path(directory))

    def state(self, whole: bool) -> dict[str, Tensor]:
        """All that another process needs to be this rank, as it is in memory.

        Not `whole`: only what no other rank has, where the weights are on all of them.
        """
        rng = {f"{RNG}{name}": tensor for name, tensor in rng_tensors().items()}
        return self._learner.state() | rng if whole else rng

    def set_state(self, state: Mapping[str, Tensor], part: StatePart) -> None:
        """This part of what `state` gave: of another rank only the weights."""
        if part == "weights":
            self._learner.set_state(state)
        else:
            restore_rng_tensors({key.removeprefix(RNG): value for key, value in state.items() if key.startswith(RNG)})

    # Weights.

    def write_weights(self, settings: WriterSettings, model_step: int) -> StoredWeights | None:
        """The first rank writes them, the others help it to gather them."""
        walk = _Walk(self._learner.tensors())
        if self._setup.rank:
            walk.finish()
            return None
        if self._writer is None or self._writer[0] != settings:
            self.close_weights()
            self._writer = settings, build_writer(settings)
        try:
            return self._writer[1].write(walk, model_step)
        except WeightSyncError:
            if walk.failure is not None:  # the others', and not the writer's
                raise walk.failure from None
            raise
        finally:
            # Whatever failed, the others are still walking.
            walk.finish()

    def confirm_weights(self) -> None:
        if self._writer is not None:
            self._writer[1].confirm()

    def close_weights(self) -> None:
        if self._writer is not None:
            self._writer[1].close()
            self._writer = None

    @property
    def _learner(self) -> Learner:
        assert self._joined is not None, "join first"
        return self._joined

    @property
    def _rng_file(self) -> str:
        return f"rng_{self._setup.rank}.safetensors"


class _StopAfter:
    """Whether an attempt was asked to stop; as a `threading.Event` says it."""

    def __init__(self, rank: Rank, attempt: int) -> None:
        self._rank, self._attempt = rank, attempt

    def is_set(self) -> bool:
        return self._rank._stopped >= self._attempt


class _Walk:
    """A `WeightSource` that can be read once, by all ranks together."""

    def __init__(self, walk: Iterator[tuple[str, Tensor]]) -> None:
        self._walk = walk
        self.failure: Exception | None = None
        """Why it did not get to its end."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from self._walk
        except Exception as error:
            self.failure = error
            raise

    def finish(self) -> None:
        for _ in self._walk:
            pass


def _own_device(asked: str, local_rank: int) -> torch.device:
    """`cuda` is the one that belongs to this rank among those that it sees."""
    device = torch.device(asked)
    if device.type != "cuda" or not torch.cuda.is_available():
        return device
    device = torch.device("cuda", local_rank % torch.cuda.device_count() if device.index is None else device.index)
    torch.cuda.set_device(device)
    return device


def _interface_towards(address: str, port: int) -> str | None:
    """The name of the network interface that leads there; None where it cannot be found out."""
    if not sys.platform.startswith("linux") or ":" in address:
        return None
    SIOCGIFADDR = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if found[20:24] == own:
                return name
    return None
