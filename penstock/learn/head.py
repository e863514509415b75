"""From hidden states to logprobs, without a vocabulary's width of logits for every token at once.

Logits are float32 whatever their operands are: rounded to bfloat16 they are off by hundredths, and the ratio of two
policies would be made of that. The backward pass makes no logits: with e = exp(logits - maximum), t = sum(e) and
r = e - t * onehot(target) kept from the forward pass, the gradient g of a token's logprob goes back as

    d hidden = -g / t * (r @ head)        d head = r^T (-g / t * hidden)

so that r is read by two products and by nothing else. At a target that is nearly certain e and t are nearly equal: r is
there the sum over the other tokens, and rounded only then. Products of e and of onehot, rounded each by itself, would
leave more of their roundings than of their difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.learn.linear import JoinedLinear

KEPT_BYTES = 256 * 2**20
"""Most that is kept of r; above it r is made again in the backward pass, in blocks of this size."""
CHUNK_BYTES = 32 * 2**20
"""Logits that live at a time: few enough to stay in a cache."""


@dataclass(frozen=True)
class TokenLogprobs:
    logprobs: Tensor
    entropy: Tensor
    """Of the whole distribution the token was drawn from; without gradient."""


def apply_head(hidden: Tensor, head: JoinedLinear, targets: Tensor, temperature: float) -> TokenLogprobs:
    """log_softmax(hidden @ head / temperature) at the targets. The gradient of the head is added to its `.grad`."""
    # Here and not at the logits, which are a hundred times as many.
    scaled = hidden if temperature == 1.0 else hidden / temperature
    logprobs, entropy = _Head.apply(scaled, head, targets)  # type: ignore[no-untyped-call]
    return TokenLogprobs(logprobs, entropy)


class _Head(torch.autograd.Function):
    """Hidden states [N, H], head [V, H], targets [N] -> logprobs [N], entropy [N]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: JoinedLinear, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden.to(head.dtype)
        size = max(1, KEPT_BYTES // (head.out_features * x.element_size()))
        keeps = ctx.needs_input_grad[0] and len(x) <= size
        kept = x.new_empty(len(x), head.out_features) if keeps else None
        logprobs, entropy, totals = _distributions(x, head, targets, kept)
        ctx.save_for_backward(hidden, x, targets, totals, *([] if kept is None else [kept]))
        ctx.head, ctx.size = head, size
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        hidden, x, targets, totals, *kept = ctx.saved_tensors
        head = ctx.head
        share = (grad / totals).neg_()[:, None]
        grad_hidden = torch.empty_like(hidden)
        for start in range(0, len(x), ctx.size):
            part = slice(start, start + ctx.size)
            rests = kept[0] if kept else x.new_empty(len(x[part]), head.out_features)
            if not kept:
                _distributions(x[part], head, targets[part], rests)
            torch.mul(head.multiply_back(rests), share[part], out=grad_hidden[part])
            head.gradients.add_product(head.weight, rests.t(), (hidden[part] * share[part]).to(x.dtype))
        return grad_hidden, None, None


def _distributions(
    x: Tensor, head: JoinedLinear, targets: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropy and the sums of e, [N] each; r [N, V] goes to `kept`, in the dtype of x."""
    weight = head.weight
    logprobs, entropy, totals = (torch.empty(len(x), dtype=weight.dtype, device=x.device) for _ in range(3))
    size = max(1, CHUNK_BYTES // (head.out_features * weight.element_size()))
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        column = targets[part, None]
        logits = head.forward(x[part])
        logits -= logits.amax(1, keepdim=True)
        exponentials = logits.exp()
        logit, own = logits.gather(1, column), exponentials.gather(1, column)
        others = exponentials.scatter_(1, column, 0).sum(1, keepdim=True)
        if kept is not None:
            kept[part] = exponentials.scatter_(1, column, -others)
        total = torch.add(others, own, out=totals[part, None])
        logprobs[part, None] = logit - total.log()
        # H = log sum exp(s) - sum p * s, with the logits shifted by their maximum.
        products = exponentials.mul_(logits).scatter_(1, column, own * logit)
        entropy[part] = (total.log() - products.sum(1, keepdim=True) / total)[:, 0]
    return logprobs, entropy, totals
