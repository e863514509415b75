"""Weights to engines of other machines, through torch.distributed: gloo between CPUs, NCCL between GPUs.

    sender                                                   receiver, each in its own process
    shared memory, as for engines of this machine            a ticket: which weights, asked of the sender's store
    whoever asked within a moment becomes one group   ---->  its place in that group
    buckets of the memory, one broadcast each         ====>  memory of its own, summed up while it arrives

The sender keeps what it wrote until the next weights are confirmed, so an engine that comes late or starts again asks
like the others and is served by itself. A receiver that dies costs its group one attempt: the others ask again, and it
is not among them. Nothing is loaded before the checksum of all received bytes is the sender's. Every wait ends.

Whoever reaches the sender's port can ask. It listens on the address it is given and no other: use one of a network that
only the cluster is in.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from penstock.errors import ConfigError, WeightSyncError
from penstock.ports import WeightSource
from penstock.weights.digest import Piece, digest_pieces, pieces, tensor_bytes, with_pool
from penstock.weights.shared_memory import SharedMemoryBuffer
from penstock.weights.stored import BroadcastWeights, LentMemory, SharedMemoryWeights, compare, views

Backend = Literal["gloo", "nccl"]

TICKETS = "tickets"
"""How many were drawn."""
ATTEMPTS = 3
"""Of a receiver, each in a new group."""
TOGETHER_S = 0.05
"""Who asks within this time of another is in one group."""
LOOK_S = 1.0
"""How often the sender looks whether somebody drew a ticket and did not say what it wants."""
CHECK_S = 0.02
"""How often it looks for the next ticket."""


class _Place(msgspec.Struct, frozen=True):
    group: int
    rank: int
    size: int
    refused: str = ""


def machine_id() -> str:
    """Equal where processes can open each other's memory: of one boot, and one space of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"


def open_store(address: str, timeout_s: float) -> Any:
    """A store of torch.distributed that listens on this address alone, on a port that nobody else has."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # The port is never free between here and there.
        master_listen_fd=listener.detach(),
    )


def join_store(address: str, port: int, timeout_s: float) -> Any:
    """Raises RuntimeError (of torch) when nobody listens there."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


class WeightServer:
    """Holds weights in shared memory and sends them to whoever asks, in a thread of its own. Calls block."""

    def __init__(
        self,
        address: str,
        *,
        backend: Backend = "gloo",
        through_memory: bool = True,
        bucket_bytes: int = 64 << 20,
        timeout_s: float = 300.0,
        connect_s: float = 20.0,
    ) -> None:
        """With `through_memory`, engines of this machine read the memory where it is."""
        if backend == "nccl" and not torch.cuda.is_available():
            raise ConfigError("channel_backend is 'nccl', which needs GPUs, and there is none here; use 'gloo'")
        self._address = address
        self._backend: Backend = backend
        self._machine = machine_id() if through_memory else None
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._connect_s = connect_s
        self._buffer = SharedMemoryBuffer(bucket_bytes=bucket_bytes)
        self._store = open_store(address, timeout_s)
        self._confirmed: SharedMemoryWeights | None = None
        self._written: SharedMemoryWeights | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="penstock-weight-server", daemon=True)
        self._thread.start()

    def write(self, source: WeightSource, model_step: int) -> BroadcastWeights:
        """Copy the weights; engines may ask for them from now on. Raises WeightSyncError."""
        self._written = None
        shared = self._written = self._buffer.write(source)
        return BroadcastWeights(
            shared=shared,
            machine=self._machine,
            address=self._address,
            port=self._store.port,
            backend=self._backend,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            connect_s=self._connect_s,
        )

    def confirm(self) -> None:
        self._buffer.confirm()
        self._confirmed = self._written

    def close(self) -> None:
        """Who is being sent something then is not sent the rest."""
        self._closing.set()
        _ask(self._store, "")
        self._thread.join()
        self._buffer.close()

    # In its thread.

    def _serve(self) -> None:
        store = join_store(self._address, self._store.port, self._timeout_s)
        first, group = 1, 0
        while not self._closing.is_set():
            tickets = dict(self._tickets(store, first))
            if tickets:
                first = max(tickets) + 1
            elif store.add(TICKETS, 0) >= first:
                first += 1  # whoever drew it is gone, and others wait behind it
            for wanted in dict.fromkeys(tickets.values()):
                group += 1
                self._serve_group(store, group, wanted, [n for n, asked in tickets.items() if asked == wanted])

    def _tickets(self, store: Any, first: int) -> Iterator[tuple[int, str]]:
        """Of those who ask next, until nobody does for a moment: which weights they want."""
        number, patience = first, LOOK_S
        while _appears(store, f"ticket/{number}", patience) and not self._closing.is_set():
            yield number, store.get(f"ticket/{number}").decode(errors="replace")
            store.delete_key(f"ticket/{number}")
            number, patience = number + 1, TOGETHER_S

    def _serve_group(self, store: Any, group: int, checksum: str, numbers: list[int]) -> None:
        size = len(numbers) + 1
        known = {weights.checksum: weights for weights in (self._confirmed, self._written) if weights is not None}
        shared = known.get(checksum)
        refused = "" if shared is not None else f"the sender does not have weights {checksum} any more"
        for rank, number in enumerate(numbers, start=1):
            store.set(f"place/{number}", msgspec.msgpack.encode(_Place(group, rank, size, refused)))
        if shared is None:
            return
        # Whatever went wrong, the receivers notice it too and ask again.
        with contextlib.suppress(RuntimeError, WeightSyncError), shared.held() as memory:
            members = _Members(store, _Place(group, 0, size), self._address, self._backend, self._connect_s)
            for bucket in memory.split(self._bucket_bytes):
                if self._closing.is_set():
                    return
                members.send(bucket)


class _Members:
    """One group of torch.distributed, which is no part of any other that this process may have."""

    def __init__(self, store: Any, place: _Place, address: str, backend: Backend, timeout_s: float) -> None:
        """Returns when all are connected. Raises RuntimeError (of torch) when one does not come."""
        prefixed = PrefixStore(f"group/{place.group}", store)
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(prefixed, place.rank, place.size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            settings = gloo._Options()
            settings._devices = [gloo.create_device(hostname=address)]
            settings._timeout = self._timeout
            self._group = dist.ProcessGroupGloo(prefixed, place.rank, place.size, settings)

    def send(self, bucket: Tensor) -> None:
        """Raises RuntimeError (of torch) when a member is gone or late."""
        self._broadcast(bucket.to(self._device))

    def receive(self, bucket: Tensor) -> None:
        staged = bucket if self._device.type == "cpu" else torch.empty_like(bucket, device=self._device)
        self._broadcast(staged)
        if staged is not bucket:
            bucket.copy_(staged)

    def _broadcast(self, bucket: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = self._timeout
        self._group.broadcast([bucket], options).wait(self._timeout)


def receive(weights: BroadcastWeights) -> LentMemory:
    """Ask the sender, and take part in one broadcast. Blocks.

    Raises WeightSyncError when it is gone, has others by now, or what arrived is not what it sent.
    """
    deadline = time.monotonic() + weights.timeout_s
    problem: Exception | None = None
    for _ in range(ATTEMPTS):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            return _receive(weights, left_s)
        except RuntimeError as error:  # a member of the group was lost; the next one is without it
            problem = error
    raise WeightSyncError(
        f"the weights of {weights.address}:{weights.port} did not arrive within {weights.timeout_s:g} s and "
        f"{ATTEMPTS} attempts: {problem}"
    ) from problem


def _receive(weights: BroadcastWeights, timeout_s: float) -> LentMemory:
    # Where nobody listens any more, torch would go on trying for all of the time.
    store = join_store(weights.address, weights.port, min(weights.connect_s, timeout_s))
    store.set_timeout(timedelta(seconds=timeout_s))
    number = _ask(store, weights.checksum)
    place = msgspec.msgpack.decode(store.get(f"place/{number}"), type=_Place)
    if place.refused:
        raise WeightSyncError(place.refused)
    address = _address_towards(weights.address, weights.port)
    members = _Members(store, place, address, weights.backend, min(weights.connect_s, timeout_s))
    memory = torch.empty(weights.num_bytes, dtype=torch.uint8)
    tensors = views(memory, weights.shared.entries)

    def arriving() -> Iterator[Piece]:
        arrived, buckets = 0, iter(memory.split(weights.bucket_bytes))
        for entry in weights.shared.entries:
            while arrived < entry.offset + entry.num_bytes:
                bucket = next(buckets)
                members.receive(bucket)
                arrived += len(bucket)
            yield from pieces(entry, tensor_bytes(tensors[entry.name]))
        for bucket in buckets:  # nothing but padding
            members.receive(bucket)

    found = with_pool(lambda pool: digest_pieces(arriving(), pool))
    compare(found, weights.checksum, f"{weights.address}:{weights.port}")
    return LentMemory(tensors, found)


def _ask(store: Any, checksum: str) -> int:
    """The number under which the answer will be found."""
    number: int = store.add(TICKETS, 1)
    store.set(f"ticket/{number}", checksum)
    return number


def _appears(store: Any, key: str, timeout_s: float) -> bool:
    """Not `store.wait`: torch prints lines for every wait that ends without the key, one a second in an idle run."""
    ends = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() >= ends:
            return False
        time.sleep(CHECK_S)
    return True


def _address_towards(address: str, port: int) -> str:
    """Of this machine, as the other one sees it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        own: str = probe.getsockname()[0]
        return own
