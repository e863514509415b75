"""The reference model of a KL: frozen weights beside the trained ones, or the base under a LoRA adapter.

It computes as the trainer does, in the same dtype: before the first step the two agree to the bit, and what the KL
measures is training and not rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ModelError
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.fused import FusedModel
from penstock.learn.head import TokenLogprobs
from penstock.learn.kl import KLConfig
from penstock.learn.linear import Gradients
from penstock.learn.load import LogprobModel, check_head, choose_way, load_model
from penstock.learn.lora import adapters_of
from penstock.learn.pack import MicroBatch
from penstock.models import resolve_model


def build_reference(
    kl: KLConfig, model: Any, way: LogprobModel, config: TrainWorkerConfig, model_dir: Path, *, deterministic: bool
) -> LogprobModel:
    """Of a trained model before its first step, or of another of the same vocabulary. Raises ModelError."""
    if kl.reference is None and adapters_of(model):
        return _base_under_adapters(model, way)
    frozen = load_model(model_dir if kl.reference is None else resolve_model(kl.reference), device=config.device)
    own, theirs = (m.get_output_embeddings().weight.shape[0] for m in (model, frozen))
    if own != theirs:
        raise ModelError(f"kl.reference {kl.reference!r} has {theirs} tokens, the trained model {own}; they must agree")
    if kl.reference is not None:
        check_head(frozen)
    frozen.requires_grad_(requires_grad=False)
    chosen = choose_way(frozen, config, Gradients(), deterministic=deterministic)
    if isinstance(chosen, FusedModel):
        chosen.freeze(drop_originals=True)
    return chosen


def _base_under_adapters(model: Any, way: LogprobModel) -> LogprobModel:
    if not isinstance(way, FusedModel):
        return _WithoutAdapters(model, way)
    base = FusedModel(model, Gradients(), way.dtype, share_prompts=way.share_prompts, adapted=False)
    base.freeze(drop_originals=False)
    return base


class _WithoutAdapters:
    """The trained model's own way, its adapters turned off meanwhile."""

    def __init__(self, model: Any, way: LogprobModel) -> None:
        self._model, self._way = model, way
        self.share_prompts, self.one_row, self.dtype = way.share_prompts, way.one_row, way.dtype
        self.module = way.module

    def refresh(self) -> None:
        """The base is read where it is."""

    def logprobs(self, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenLogprobs:
        with _turned_off(self._model), torch.no_grad():
            return self._way.logprobs(micro_batch)


@contextlib.contextmanager
def _turned_off(model: Any) -> Iterator[None]:
    layers = adapters_of(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
