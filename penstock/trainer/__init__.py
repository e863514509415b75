"""The loops: trainers, evaluation, trackers, trajectories, the terminal display."""

from penstock.trainer.config import RLColocateTrainerConfig, RLDisaggregatedTrainerConfig, RLTrainerConfig
from penstock.trainer.distillation import DistillationConfig, TeacherConfig
from penstock.trainer.evaluator import EvalTaskConfig, EvaluatorConfig
from penstock.trainer.services import (
    MlflowTrackerConfig,
    OpenTelemetryConfig,
    TrackioTrackerConfig,
    WandbTrackerConfig,
)
from penstock.trainer.trackers import JsonlTrackerConfig, SinkConfig, TensorBoardTrackerConfig, Tracker, TrackerConfig

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
