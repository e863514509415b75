"""What waits for training: the replay buffer, the states of a group, staleness, storage."""

from penstock.replay.buffer import ReplayBuffer
from penstock.replay.config import ReplayBufferConfig
from penstock.replay.ledger import LEDGER_FILE, Ledger, has_ledger
from penstock.replay.lifecycle import WAITING, Conservation, DiscardReason, GroupState, Lifecycle, Transition
from penstock.replay.restore import Restored
from penstock.replay.search import Asked, find_groups
from penstock.replay.signal import Signal
from penstock.replay.staleness import (
    StaleRule,
    calculate_seq_staleness,
    calculate_stale_threshold,
    group_staleness,
    rollout_staleness,
)
from penstock.replay.storage import MemoryStorage, Storage
from penstock.replay.story import group_story, ledger_summary, render_story, render_summary

__all__ = [
    "LEDGER_FILE",
    "WAITING",
    "Asked",
    "Conservation",
    "DiscardReason",
    "GroupState",
    "Ledger",
    "Lifecycle",
    "MemoryStorage",
    "ReplayBuffer",
    "ReplayBufferConfig",
    "Restored",
    "Signal",
    "StaleRule",
    "Storage",
    "Transition",
    "calculate_seq_staleness",
    "calculate_stale_threshold",
    "find_groups",
    "group_staleness",
    "group_story",
    "has_ledger",
    "ledger_summary",
    "render_story",
    "render_summary",
    "rollout_staleness",
]
