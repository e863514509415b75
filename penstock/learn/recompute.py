"""Activation checkpointing for the modules of transformers: a layer keeps its input, and the backward pass computes the
rest again.

transformers does this in training mode only, which turns on whatever dropout a family has, wherever it has it. Here the
layers are wrapped instead and the model stays in evaluation mode, so what is trained is what the engine computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from penstock.errors import ModelError


def recompute_layers(model: Any) -> None:
    """From now on the outermost layers of the model are computed again where a gradient is wanted.

    Raises ModelError for a model whose layers transformers does not name as such.
    """
    layers = outermost_layers(model)
    if not layers:
        raise ModelError(
            f"train.activation_checkpointing is on, but transformers names no layer of {type(model).__name__} that can "
            "be computed again; set it to False, and lower max_tokens_per_micro_batch if memory is short"
        )
    for layer in layers.values():
        layer.forward = functools.partial(_recomputed, layer.forward)


def outermost_layers(model: Any) -> dict[str, Any]:
    """The layers that the model is a stack of, by name; none where transformers does not name them as such."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    return {name: layer for name, layer in layers.items() if not any(name.startswith(f"{outer}.") for outer in layers)}


def _recomputed(forward: Callable[..., Any], *arguments: Any, **fields: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **fields)
    # Nothing in evaluation mode asks for random numbers.
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **fields)
