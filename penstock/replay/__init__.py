"""What waits for training: the replay buffer, the states of a group, staleness, storage."""

from penstock.replay.buffer import ReplayBuffer, ReplayBufferConfig
from penstock.replay.lifecycle import Conservation, DiscardReason, GroupState, Lifecycle, Transition
from penstock.replay.signal import Signal
from penstock.replay.staleness import (
    StaleRule,
    calculate_seq_staleness,
    calculate_stale_threshold,
    group_staleness,
    rollout_staleness,
)
from penstock.replay.storage import MemoryStorage, Storage

__all__ = [
    "Conservation",
    "DiscardReason",
    "GroupState",
    "Lifecycle",
    "MemoryStorage",
    "ReplayBuffer",
    "ReplayBufferConfig",
    "Signal",
    "StaleRule",
    "Storage",
    "Transition",
    "calculate_seq_staleness",
    "calculate_stale_threshold",
    "group_staleness",
    "rollout_staleness",
]
