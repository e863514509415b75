"""How many groups to make, when, from which weights: progress, strategies, and the manager that runs them."""

from penstock.produce.ask_once import AskOnceStrategy, AskOnceStrategyConfig
from penstock.produce.async_strategy import AsyncProduceStrategy, AsyncProduceStrategyConfig
from penstock.produce.config import AgentLoopManagerConfig, TaskSpecConfig, World, check_templates, load_prompts
from penstock.produce.context import ProduceContext
from penstock.produce.failures import FailurePolicyConfig
from penstock.produce.manager import AgentLoopManager, AgentLoopManagerStatus
from penstock.produce.progress import ProduceProgress
from penstock.produce.result import ProduceBatchResult, TaskResult
from penstock.produce.strategy import (
    IsValidSampleFn,
    PooledStrategy,
    PooledStrategyConfig,
    ProduceBatchStatus,
    ProduceStrategy,
    ProduceStrategyConfig,
    ShouldContinueFn,
    default_is_valid_sample_fn,
    default_should_continue_fn,
    has_different_rewards,
)
from penstock.produce.sync_strategy import SyncProduceStrategy, SyncProduceStrategyConfig
from penstock.replay import calculate_seq_staleness, calculate_stale_threshold

__all__ = [
    "AgentLoopManager",
    "AgentLoopManagerConfig",
    "AgentLoopManagerStatus",
    "AskOnceStrategy",
    "AskOnceStrategyConfig",
    "AsyncProduceStrategy",
    "AsyncProduceStrategyConfig",
    "FailurePolicyConfig",
    "IsValidSampleFn",
    "PooledStrategy",
    "PooledStrategyConfig",
    "ProduceBatchResult",
    "ProduceBatchStatus",
    "ProduceContext",
    "ProduceProgress",
    "ProduceStrategy",
    "ProduceStrategyConfig",
    "ShouldContinueFn",
    "SyncProduceStrategy",
    "SyncProduceStrategyConfig",
    "TaskResult",
    "TaskSpecConfig",
    "World",
    "calculate_seq_staleness",
    "calculate_stale_threshold",
    "check_templates",
    "default_is_valid_sample_fn",
    "default_should_continue_fn",
    "has_different_rewards",
    "load_prompts",
]
