"""Forward and backward passes of the Llama and Qwen families, for training on a CPU.

Against the modules of transformers: no padding, q, k and v in one product and gate and up in one, no pass over memory
that a neighbour could make, gradients of weights added in place, bfloat16 operands (see `linear`), and attention that
computes no pair of cells of which none sees the other (see `attention`). The weights stay those of the transformers
model, under their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from penstock.learn.attention import TreeAttention
from penstock.learn.head import TokenLogprobs, apply_head
from penstock.learn.linear import Gradients, JoinedLinear
from penstock.learn.lora import adapters_of
from penstock.learn.pack import MicroBatch
from penstock.models.families import head_dim, is_like_llama
from penstock.models.threads import Pace

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def can_fuse(model: Any) -> bool:
    adapted = (name.rsplit(".", 1)[-1] for name in adapters_of(model))
    return model.device.type == "cpu" and is_like_llama(model.config) and all(name in PROJECTIONS for name in adapted)


@dataclass(frozen=True, eq=False)
class _Norm:
    weight: Parameter
    eps: float
    gradients: Gradients


@dataclass(frozen=True, eq=False)
class _Layer:
    qkv_norm: _Norm
    qkv: JoinedLinear
    qk_norms: tuple[Parameter, Parameter] | None
    out: JoinedLinear
    mlp_norm: _Norm
    gate_up: JoinedLinear
    down: JoinedLinear


class FusedModel:
    """A transformers model seen as its weights. `refresh` after they changed."""

    one_row = True
    module = None

    def __init__(
        self,
        model: Any,
        gradients: Gradients,
        dtype: torch.dtype,
        *,
        share_prompts: bool = True,
        activation_checkpointing: bool = False,
        adapted: bool = True,
        pace: Pace | None = None,
    ) -> None:
        """Without `adapted` it is the base under the adapters. `pace` is told of every layer, there and back."""
        self.share_prompts = share_prompts
        self._adapted = adapted
        self._frozen = False
        config = model.config
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = head_dim(config)
        self._eps: float = config.rms_norm_eps
        self._gradients, self.dtype = gradients, dtype
        self._checkpointing = activation_checkpointing
        self._pace = pace
        self._rotary = model.model.rotary_emb
        self._embedding: Parameter = model.model.embed_tokens.weight
        self._layers = [self._layer(layer) for layer in model.model.layers]
        self._norm = _Norm(model.model.norm.weight, self._eps, gradients)
        self._head = self._join(model.get_output_embeddings())
        self.refresh()

    def refresh(self) -> None:
        if not self._frozen:
            for linear in (*self._linears(), self._head):
                linear.refresh()

    def freeze(self, *, drop_originals: bool) -> None:
        """The weights never change again; those that are only read as a copy need not be kept beside it."""
        self._frozen = True
        if drop_originals:
            for linear in self._linears():
                linear.drop_originals()

    def _linears(self) -> Iterator[JoinedLinear]:
        for layer in self._layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)

    def logprobs(self, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenLogprobs:
        """Of every target of a micro-batch that lies in one row. Gradients are added to the parameters' `.grad`."""
        attention = TreeAttention(micro_batch)
        rope = self._rope(torch.from_numpy(micro_batch.position_ids))
        hidden = self._after(0, self._embed(torch.from_numpy(micro_batch.input_ids[0])))
        for number, layer in enumerate(self._layers, 1):
            if self._checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(self._run_layer, layer, hidden, attention, rope, use_reentrant=False)
            else:
                hidden = self._run_layer(layer, hidden, attention, rope)
            hidden = self._after(number, hidden)
        picked = hidden.index_select(0, torch.from_numpy(micro_batch.predicting))
        normed = _NormLinear.apply(picked, self._norm, None)  # type: ignore[no-untyped-call]
        targets, temperatures = torch.from_numpy(micro_batch.targets), torch.from_numpy(micro_batch.temperatures)
        return apply_head(normed, self._head, targets, temperatures, entropy_gradient=entropy_gradient)

    def _embed(self, ids: Tensor) -> Tensor:
        if self._embedding.requires_grad:
            return _Embed.apply(self._embedding, self._gradients, ids)  # type: ignore[no-any-return,no-untyped-call]
        # A frozen one has no gradient, but what comes after it has: autograd must find a beginning.
        return self._embedding.detach().index_select(0, ids).requires_grad_(torch.is_grad_enabled())

    def _after(self, layers: int, hidden: Tensor) -> Tensor:
        """What so many layers made of a micro-batch."""
        if self._pace is None:
            return hidden
        first, last = layers == 0, layers == len(self._layers)
        return _Told.apply(hidden, self._pace, first, last)  # type: ignore[no-any-return,no-untyped-call]

    def _run_layer(
        self, layer: _Layer, hidden: Tensor, attention: TreeAttention, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        qkv = _NormLinear.apply(hidden, layer.qkv_norm, layer.qkv)  # type: ignore[no-untyped-call]
        attended = self._attend(layer, qkv, attention, rope)
        hidden = _LinearAdd.apply(attended, hidden, layer.out)  # type: ignore[no-untyped-call]
        gate_up = _NormLinear.apply(hidden, layer.mlp_norm, layer.gate_up)  # type: ignore[no-untyped-call]
        return _GatedLinearAdd.apply(gate_up, hidden, layer.down)  # type: ignore[no-any-return,no-untyped-call]

    def _attend(self, layer: _Layer, qkv: Tensor, attention: TreeAttention, rope: tuple[Tensor, Tensor]) -> Tensor:
        both, dim = self._heads + self._kv_heads, self._head_dim
        qk, value = qkv.view(len(qkv), -1, dim).split([both, self._kv_heads], dim=1)
        if layer.qk_norms is not None:
            query, key = qk.split([self._heads, self._kv_heads], dim=1)
            query_norm, key_norm = layer.qk_norms
            query, key = F.rms_norm(query, (dim,), query_norm, self._eps), F.rms_norm(key, (dim,), key_norm, self._eps)
            qk = torch.cat([query, key], dim=1)
        cos, sin = rope
        # sin carries the sign of rotate_half, so the rotation is a roll.
        qk = torch.addcmul(qk * cos, qk.roll(dim // 2, -1), sin)
        query, key = qk.split([self._heads, self._kv_heads], dim=1)
        return attention.attend(query, key, value, dim**-0.5)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every cell: T x 1 x d."""
        cos, sin = self._rotary(self._embedding[:0].detach(), positions)
        cos, sin = cos[0, :, None], sin[0, :, None].clone()
        sin[..., : self._head_dim // 2] *= -1
        return cos, sin

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        normed = hasattr(attention, "q_norm")
        return _Layer(
            qkv_norm=_Norm(layer.input_layernorm.weight, self._eps, self._gradients),
            qkv=self._join(attention.q_proj, attention.k_proj, attention.v_proj),
            qk_norms=(attention.q_norm.weight, attention.k_norm.weight) if normed else None,
            out=self._join(attention.o_proj),
            mlp_norm=_Norm(layer.post_attention_layernorm.weight, self._eps, self._gradients),
            gate_up=self._join(mlp.gate_proj, mlp.up_proj),
            down=self._join(mlp.down_proj),
        )

    def _join(self, *layers: torch.nn.Linear) -> JoinedLinear:
        return JoinedLinear(list(layers), self.dtype, self._gradients, adapted=self._adapted)


class _Told(torch.autograd.Function):
    """Nothing but a place between layers: here one ends and the next begins, on the way there and on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, pace: Pace, first: bool, last: bool) -> Tensor:
        ctx.pace, ctx.last = pace, last
        if first:
            pace.begin()
        else:
            pace.piece(len(hidden), "there" if ctx.needs_input_grad[0] else "score")
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.last:
            ctx.pace.begin()
        else:
            ctx.pace.piece(len(grad), "back")
        return grad, None, None, None


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedding: Parameter, gradients: Gradients, ids: Tensor) -> Tensor:
        ctx.embedding, ctx.gradients, ctx.ids = embedding, gradients, ids
        return embedding.index_select(0, ids)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.gradients.add_rows(ctx.embedding, ctx.ids, grad)
        return None, None, None


class _NormLinear(torch.autograd.Function):
    """linear(rms_norm(hidden) * weight), or the norm alone."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, norm: _Norm, linear: JoinedLinear | None) -> Tensor:
        mean_square = torch.linalg.vector_norm(hidden, dim=1, keepdim=True).square_().div_(hidden.shape[1])
        scale = mean_square.add_(norm.eps).rsqrt_()
        normed: Tensor = (hidden * scale).mul_(norm.weight.detach())
        ctx.norm, ctx.linear = norm, linear
        if linear is None:
            ctx.save_for_backward(hidden, scale)
            return normed
        x = normed.to(linear.dtype)
        ctx.save_for_backward(hidden, scale, x)
        return linear.forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        hidden, scale, *x = ctx.saved_tensors
        weight = ctx.norm.weight.detach()
        if ctx.linear is not None:
            grad = ctx.linear.backward(grad, x[0])
        unit = hidden * scale
        by_unit = grad * unit
        if ctx.norm.weight.requires_grad:
            ctx.norm.gradients.add(ctx.norm.weight, by_unit.sum(0))
        # y = unit * w, unit = h * s(h):  dh = s * (w * dy - unit * mean(w * dy * unit))
        along = torch.mv(by_unit, weight).div_(-hidden.shape[1])
        return torch.mul(grad, weight, out=by_unit).addcmul_(unit, along[:, None]).mul_(scale), None, None


class _LinearAdd(torch.autograd.Function):
    """residual + linear(hidden)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, residual: Tensor, linear: JoinedLinear) -> Tensor:
        x = hidden.to(linear.dtype)
        ctx.linear = linear
        ctx.save_for_backward(x)
        return linear.forward(x, add_to=residual.clone())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.linear.backward(grad, x), grad, None


class _GatedLinearAdd(torch.autograd.Function):
    """residual + linear(silu(gate) * up), with gate and up side by side."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, residual: Tensor, linear: JoinedLinear) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        x = F.silu(gate).mul_(up).to(linear.dtype)
        ctx.linear = linear
        ctx.save_for_backward(gate_up)
        return linear.forward(x, add_to=residual.clone())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=1)
        opened = F.silu(gate)
        grad_x = ctx.linear.backward(grad, (opened * up).to(ctx.linear.dtype))
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=1)
        torch.mul(grad_x, opened, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_x.mul_(up), gate, grad_input=grad_gate)
        return grad_gate_up, grad, None
