"""The loops: trainers, evaluation, trackers, trajectories, the terminal display.

Configurations are loaded when they are first used: whoever looks at a run needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import from_modules

if TYPE_CHECKING:
    from penstock.trainer.config import RLColocateTrainerConfig, RLDisaggregatedTrainerConfig, RLTrainerConfig
    from penstock.trainer.distillation import DistillationConfig, TeacherConfig
    from penstock.trainer.evaluator import EvalTaskConfig, EvaluatorConfig
    from penstock.trainer.services import (
        MlflowTrackerConfig,
        OpenTelemetryConfig,
        TrackioTrackerConfig,
        WandbTrackerConfig,
    )
    from penstock.trainer.trackers import (
        JsonlTrackerConfig,
        SinkConfig,
        TensorBoardTrackerConfig,
        Tracker,
        TrackerConfig,
    )

__all__ = [
    "DistillationConfig",
    "EvalTaskConfig",
    "EvaluatorConfig",
    "JsonlTrackerConfig",
    "MlflowTrackerConfig",
    "OpenTelemetryConfig",
    "RLColocateTrainerConfig",
    "RLDisaggregatedTrainerConfig",
    "RLTrainerConfig",
    "SinkConfig",
    "TeacherConfig",
    "TensorBoardTrackerConfig",
    "Tracker",
    "TrackerConfig",
    "TrackioTrackerConfig",
    "WandbTrackerConfig",
]

__getattr__ = from_modules(
    __name__,
    {
        "config": ["RLColocateTrainerConfig", "RLDisaggregatedTrainerConfig", "RLTrainerConfig"],
        "distillation": ["DistillationConfig", "TeacherConfig"],
        "evaluator": ["EvalTaskConfig", "EvaluatorConfig"],
        "services": ["MlflowTrackerConfig", "OpenTelemetryConfig", "TrackioTrackerConfig", "WandbTrackerConfig"],
        "trackers": ["JsonlTrackerConfig", "SinkConfig", "TensorBoardTrackerConfig", "Tracker", "TrackerConfig"],
    },
)
