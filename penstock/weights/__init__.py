"""Trainer to engines: one channel per way the bytes travel.

in_process     an engine in this process reads the trainer's tensors
shared_memory  one copy in shared memory, for engine processes of one machine
disk           safetensors files, for engines on other machines with the same file system
broadcast      torch.distributed, for engines on other machines; shared memory for those on the sender's
channel        what these have in common: written once, told to the engines, compared
stored         what a channel tells an engine: where the bytes are and their checksum
digest         a checksum as fast as reading
confirm        a sync is done when the engine says so

A sync is a transaction: it returns when the model step and the checksum of the received bytes are confirmed, and raises
WeightSyncError otherwise; a sync that raised did not happen.

What has torch in it is loaded when it is first used: whoever confirms needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import from_modules

if TYPE_CHECKING:
    from penstock.weights.channel import DistantWeights, StoredChannel, WriterSettings, build_channel
    from penstock.weights.in_process import InProcessChannel
    from penstock.weights.shared_memory import SharedMemoryBuffer
    from penstock.weights.stored import BroadcastWeights, DiskWeights, SharedMemoryWeights, StoredWeights

__all__ = [
    "BroadcastWeights",
    "DiskWeights",
    "DistantWeights",
    "InProcessChannel",
    "SharedMemoryBuffer",
    "SharedMemoryWeights",
    "StoredChannel",
    "StoredWeights",
    "WriterSettings",
    "build_channel",
]

__getattr__ = from_modules(
    __name__,
    {
        "channel": ["DistantWeights", "StoredChannel", "WriterSettings", "build_channel"],
        "in_process": ["InProcessChannel"],
        "shared_memory": ["SharedMemoryBuffer"],
        "stored": ["BroadcastWeights", "DiskWeights", "SharedMemoryWeights", "StoredWeights"],
    },
)
