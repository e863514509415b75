"""The loops: trainers, evaluation, trackers, trajectories, the terminal display."""

from penstock.trainer.config import RLColocateTrainerConfig, RLDisaggregatedTrainerConfig, RLTrainerConfig
from penstock.trainer.evaluator import EvalTaskConfig, EvaluatorConfig
from penstock.trainer.trackers import (
    JsonlTrackerConfig,
    TensorBoardTrackerConfig,
    Tracker,
    TrackerConfig,
    WandbTrackerConfig,
)

__all__ = [
    "EvalTaskConfig",
    "EvaluatorConfig",
    "JsonlTrackerConfig",
    "RLColocateTrainerConfig",
    "RLDisaggregatedTrainerConfig",
    "RLTrainerConfig",
    "TensorBoardTrackerConfig",
    "Tracker",
    "TrackerConfig",
    "WandbTrackerConfig",
]
