"""The loops: trainers, evaluation, trackers, trajectories, the terminal display."""

from penstock.trainer.config import RLColocateTrainerConfig, RLDisaggregatedTrainerConfig, RLTrainerConfig
from penstock.trainer.evaluator import EvaluatorConfig
from penstock.trainer.trackers import JsonlTrackerConfig, TensorBoardTrackerConfig, WandbTrackerConfig

__all__ = [
    "EvaluatorConfig",
    "JsonlTrackerConfig",
    "RLColocateTrainerConfig",
    "RLDisaggregatedTrainerConfig",
    "RLTrainerConfig",
    "TensorBoardTrackerConfig",
    "WandbTrackerConfig",
]
