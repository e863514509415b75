"""Penstock: reinforcement-learning post-training for language models.

What a run file imports is here, and is loaded when it is first used: importing `penstock` costs nothing and brings
neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.agent_loop import (
        AgentLoop,
        AgentLoopConfig,
        SingleTurnAgentLoop,
        SingleTurnAgentLoopConfig,
    )
    from penstock.config import (
        Config,
    )
    from penstock.data import (
        AdditionConfig,
        DatasetConfig,
        GeneratorConfig,
        PromptSourceConfig,
        ReasoningGymConfig,
        ReverseWordConfig,
        SamplerConfig,
        SortLettersConfig,
    )
    from penstock.engine import (
        EmbeddedEngineConfig,
        EngineConfig,
        EnginesConfig,
        RolloutControllerConfig,
        VllmEngineConfig,
    )
    from penstock.errors import (
        ConfigError,
        DataFailure,
        InfrastructureFailure,
        Interrupted,
        PenstockError,
        RefusedError,
        RunError,
    )
    from penstock.judger import (
        ComposedJudgerConfig,
        Judger,
        JudgerConfig,
        NativeJudgerConfig,
        exact_match,
        final_number,
        matching_characters,
        math_equal,
        reasoning_gym_score,
        weighted_sum,
    )
    from penstock.learn import (
        LossConfig,
        TrainWorkerConfig,
    )
    from penstock.produce import (
        AgentLoopManagerConfig,
        AsyncProduceStrategyConfig,
        FailurePolicyConfig,
        ProduceStrategy,
        ProduceStrategyConfig,
        SyncProduceStrategyConfig,
        TaskSpecConfig,
        has_different_rewards,
    )
    from penstock.replay import (
        ReplayBufferConfig,
    )
    from penstock.rollout import (
        FinishReason,
        Prompt,
        RolloutState,
        SampleParams,
        Segment,
        Status,
        Tokens,
        Turn,
        Unjudged,
        Verdict,
        new_rollout,
    )
    from penstock.trainer import (
        EvalTaskConfig,
        EvaluatorConfig,
        JsonlTrackerConfig,
        RLColocateTrainerConfig,
        RLDisaggregatedTrainerConfig,
        TensorBoardTrackerConfig,
        Tracker,
        TrackerConfig,
        WandbTrackerConfig,
    )

_HOMES = {
    "agent_loop": [
        "AgentLoop",
        "AgentLoopConfig",
        "SingleTurnAgentLoop",
        "SingleTurnAgentLoopConfig",
    ],
    "config": [
        "Config",
    ],
    "data": [
        "AdditionConfig",
        "DatasetConfig",
        "GeneratorConfig",
        "PromptSourceConfig",
        "ReasoningGymConfig",
        "ReverseWordConfig",
        "SamplerConfig",
        "SortLettersConfig",
    ],
    "engine": [
        "EmbeddedEngineConfig",
        "EngineConfig",
        "EnginesConfig",
        "RolloutControllerConfig",
        "VllmEngineConfig",
    ],
    "errors": [
        "ConfigError",
        "DataFailure",
        "InfrastructureFailure",
        "Interrupted",
        "PenstockError",
        "RefusedError",
        "RunError",
    ],
    "judger": [
        "ComposedJudgerConfig",
        "Judger",
        "JudgerConfig",
        "NativeJudgerConfig",
        "exact_match",
        "final_number",
        "matching_characters",
        "math_equal",
        "reasoning_gym_score",
        "weighted_sum",
    ],
    "learn": [
        "LossConfig",
        "TrainWorkerConfig",
    ],
    "produce": [
        "AgentLoopManagerConfig",
        "AsyncProduceStrategyConfig",
        "FailurePolicyConfig",
        "ProduceStrategy",
        "ProduceStrategyConfig",
        "SyncProduceStrategyConfig",
        "TaskSpecConfig",
        "has_different_rewards",
    ],
    "replay": [
        "ReplayBufferConfig",
    ],
    "rollout": [
        "FinishReason",
        "Prompt",
        "RolloutState",
        "SampleParams",
        "Segment",
        "Status",
        "Tokens",
        "Turn",
        "Unjudged",
        "Verdict",
        "new_rollout",
    ],
    "trainer": [
        "EvalTaskConfig",
        "EvaluatorConfig",
        "JsonlTrackerConfig",
        "RLColocateTrainerConfig",
        "RLDisaggregatedTrainerConfig",
        "TensorBoardTrackerConfig",
        "Tracker",
        "TrackerConfig",
        "WandbTrackerConfig",
    ],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AdditionConfig",
    "AgentLoop",
    "AgentLoopConfig",
    "AgentLoopManagerConfig",
    "AsyncProduceStrategyConfig",
    "ComposedJudgerConfig",
    "Config",
    "ConfigError",
    "DataFailure",
    "DatasetConfig",
    "EmbeddedEngineConfig",
    "EngineConfig",
    "EnginesConfig",
    "EvalTaskConfig",
    "EvaluatorConfig",
    "FailurePolicyConfig",
    "FinishReason",
    "GeneratorConfig",
    "InfrastructureFailure",
    "Interrupted",
    "JsonlTrackerConfig",
    "Judger",
    "JudgerConfig",
    "LossConfig",
    "NativeJudgerConfig",
    "PenstockError",
    "ProduceStrategy",
    "ProduceStrategyConfig",
    "Prompt",
    "PromptSourceConfig",
    "RLColocateTrainerConfig",
    "RLDisaggregatedTrainerConfig",
    "ReasoningGymConfig",
    "RefusedError",
    "ReplayBufferConfig",
    "ReverseWordConfig",
    "RolloutControllerConfig",
    "RolloutState",
    "RunError",
    "SampleParams",
    "SamplerConfig",
    "Segment",
    "SingleTurnAgentLoop",
    "SingleTurnAgentLoopConfig",
    "SortLettersConfig",
    "Status",
    "SyncProduceStrategyConfig",
    "TaskSpecConfig",
    "TensorBoardTrackerConfig",
    "Tokens",
    "Tracker",
    "TrackerConfig",
    "TrainWorkerConfig",
    "Turn",
    "Unjudged",
    "Verdict",
    "VllmEngineConfig",
    "WandbTrackerConfig",
    "exact_match",
    "final_number",
    "has_different_rewards",
    "matching_characters",
    "math_equal",
    "new_rollout",
    "reasoning_gym_score",
    "weighted_sum",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
