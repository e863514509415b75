"""The logprobs of a micro-batch through the modules of transformers: any causal LM, torch.autocast for bfloat16.

Gradients are autograd's own, so whatever hangs on the modules works: sharded weights, adapters, hooks.

autocast rounds the weights of linear layers to the nearest. They are given to it rounded as an engine has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.learn.head import TokenLogprobs, apply_plain_head
from penstock.learn.pack import MicroBatch
from penstock.models.rounding import rounded
from penstock.models.threads import Pace


class PlainModel:
    """A transformers causal LM. Without `share_prompts` every row is one segment with all that comes before it, and
    the model only needs to know a padding mask."""

    one_row = False

    def __init__(
        self, model: Any, dtype: torch.dtype = torch.float32, *, share_prompts: bool, pace: Pace | None = None
    ) -> None:
        """`pace` is told of every forward pass."""
        self.share_prompts = share_prompts
        self._pace = pace
        self._model, self.dtype = model, dtype
        # A dense mask is as long as a row squared; a GPU need not make it. On a CPU FlexAttention has no backward pass.
        self._flex = share_prompts and model.device.type != "cpu"
        if self._flex:
            model.set_attn_implementation("flex_attention")
        if dtype == torch.bfloat16:
            _round_linear_layers(model)
        self.module = _ToLogprobs(model, dtype)
        """All of the forward pass as one module: what shards the weights sees where it begins and ends."""

    def refresh(self) -> None:
        """The weights are read where they are."""

    def logprobs(self, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenLogprobs:
        """log_softmax(logits / temperature) of every target of the micro-batch."""
        ends = torch.from_numpy(micro_batch.ends)
        device = self._model.device
        mask: Any
        if self._flex:
            mask = flex_mask(ends.to(device))
        else:
            mask = dense_mask(ends, self._model.dtype) if self.share_prompts else padding_mask(micro_batch)
            mask = mask.to(device)
        columns = (micro_batch.input_ids, micro_batch.position_ids, micro_batch.predicting, micro_batch.targets)
        ids, positions, predicting, targets = (torch.from_numpy(column).to(device) for column in columns)
        temperatures = torch.from_numpy(micro_batch.temperatures).to(device)
        if self._pace is not None:
            self._pace.begin()
        computed = self.module(ids, mask, positions, predicting, targets, temperatures, entropy_gradient)
        if self._pace is not None:
            self._pace.piece(ids.numel())
        return TokenLogprobs(*computed)


class _ToLogprobs(torch.nn.Module):
    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self._dtype = model, dtype

    def forward(
        self,
        ids: Tensor,
        mask: Any,
        positions: Tensor,
        predicting: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(ids.device.type, self._dtype, enabled=self._dtype != torch.float32):
            hidden = self.model.base_model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
            ).last_hidden_state
        picked = hidden.flatten(0, 1).index_select(0, predicting)
        head = self.model.get_output_embeddings()
        # Under autocast too the head's dtype is that of its weights.
        computed = apply_plain_head(
            picked.to(head.weight.dtype), head, targets, temperatures, entropy_gradient=entropy_gradient
        )
        return computed.logprobs, computed.entropy


def _round_linear_layers(model: Any) -> None:
    """Under autocast; elsewhere they compute as before."""
    from transformers.pytorch_utils import Conv1D

    for module in model.base_model.modules():
        if type(module) in (torch.nn.Linear, Conv1D):
            module.forward = functools.partial(_linear, module, transposed=isinstance(module, Conv1D))


def _linear(module: Any, x: Tensor, *, transposed: bool) -> Tensor:
    weight: Tensor = module.weight
    if torch.is_autocast_enabled(x.device.type):
        weight = _Rounded.apply(weight)  # type: ignore[no-untyped-call]
    return F.linear(x, weight.t() if transposed else weight, module.bias)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return rounded(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.float()


def sees(ends: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a cell of a row sees another, as FlexAttention asks it: by row, head, place of query, place of key."""

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[row, key])

    return seen


def flex_mask(ends: Tensor) -> Any:
    """What `dense_mask` says, in blocks: those that nobody sees are never computed."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = ends.shape
    return create_block_mask(sees(ends), rows, None, length, length, device=ends.device)


def dense_mask(ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive [rows, 1, length, length]: 0 where a cell sees another, -inf where not. Every cell sees itself."""
    rows, length = ends.shape
    row, place = torch.arange(rows)[:, None, None], torch.arange(length)
    seen = sees(ends)(row, row, place[:, None], place)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None]


def padding_mask(micro_batch: MicroBatch) -> Tensor:
    """[rows, length]: 1 where a row has a token. All that a plain causal mask needs to know."""
    used = np.arange(micro_batch.ends.shape[1]) < micro_batch.lengths[:, None]
    return torch.from_numpy(used).long()
