"""Groups to gradient: advantages, batch preparation, packing, losses, and the worker that holds the trained weights."""

from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.correction import CorrectionConfig
from penstock.learn.kl import KLConfig
from penstock.learn.lora import LoRAConfig
from penstock.learn.losses import (
    CISPOLossConfig,
    CustomLossConfig,
    DPPOLossConfig,
    GSPOLossConfig,
    LossConfig,
    PGLossConfig,
    PPOLossConfig,
)
from penstock.learn.overlong import OverlongConfig

__all__ = [
    "CISPOLossConfig",
    "CorrectionConfig",
    "CustomLossConfig",
    "DPPOLossConfig",
    "GSPOLossConfig",
    "KLConfig",
    "LoRAConfig",
    "LossConfig",
    "OverlongConfig",
    "PGLossConfig",
    "PPOLossConfig",
    "TrainBatch",
    "TrainWorkerConfig",
    "prepare_batch",
]
