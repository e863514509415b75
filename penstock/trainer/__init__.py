"""The loops: trainers, evaluation, trackers, trajectories, the terminal display."""

from penstock.trainer.config import RLColocateTrainerConfig, RLDisaggregatedTrainerConfig, RLTrainerConfig
from penstock.trainer.distillation import DistillationConfig, TeacherConfig
from penstock.trainer.evaluator import EvalTaskConfig, EvaluatorConfig
from penstock.trainer.trackers import (
    JsonlTrackerConfig,
    TensorBoardTrackerConfig,
    Tracker,
    TrackerConfig,
    WandbTrackerConfig,
)

__all__ = [
    "DistillationConfig",
    "EvalTaskConfig",
    "EvaluatorConfig",
    "JsonlTrackerConfig",
    "RLColocateTrainerConfig",
    "RLDisaggregatedTrainerConfig",
    "RLTrainerConfig",
    "TeacherConfig",
    "TensorBoardTrackerConfig",
    "Tracker",
    "TrackerConfig",
    "WandbTrackerConfig",
]
