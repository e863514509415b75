"""Groups to gradient: advantages, batch preparation, packing, losses, and the worker that holds the trained weights."""

from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.config import LossConfig, TrainWorkerConfig

__all__ = ["LossConfig", "TrainBatch", "TrainWorkerConfig", "prepare_batch"]
