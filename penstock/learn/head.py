"""From hidden states to logprobs, without a vocabulary's width of logits for every token at once.

Logits are float32 whatever their operands are: rounded to bfloat16 they are off by hundredths, and the ratio of two
policies would be made of that. The backward pass makes no logits: with e = exp(logits - maximum), t = sum(e) and
r = e - t * onehot(target) kept from the forward pass, the gradient g of a token's logprob goes back as

    d hidden = -g / t * (r @ head)        d head = r^T (-g / t * hidden)

so that r is read by two products and by nothing else. At a target that is nearly certain e and t are nearly equal: r is
there the sum over the other tokens, and rounded only then. Products of e and of onehot, rounded each by itself, would
leave more of their roundings than of their difference.

Where the entropy H has a gradient h too (a bonus for it), the gradient of a logit is, with p the probabilities,

    g * (onehot(target) - p) - h * p * (log p + H)

which is made from the logits again, in blocks.

`apply_plain_head` is the same number through the module and autograd alone: for weights that are sharded, adapted or
hooked, whose gradient is not ours to write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock.learn.linear import JoinedLinear

KEPT_BYTES = 256 * 2**20
"""Most that is kept of r; above it r is made again in the backward pass, in blocks of this size."""
CHUNK_BYTES = 32 * 2**20
"""Logits that live at a time: few enough to stay in a cache."""


@dataclass(frozen=True)
class TokenLogprobs:
    logprobs: Tensor
    entropy: Tensor
    """Of the whole distribution the token was drawn from; without gradient unless it was asked for."""


def apply_head(
    hidden: Tensor, head: JoinedLinear, targets: Tensor, temperatures: Tensor, *, entropy_gradient: bool = False
) -> TokenLogprobs:
    """log_softmax(hidden @ head / temperature) at the targets. The gradient of the head is added to its `.grad`."""
    scaled = _cooled(hidden, temperatures)
    logprobs, entropy = _Head.apply(scaled, head, targets, entropy_gradient)  # type: ignore[no-untyped-call]
    return TokenLogprobs(logprobs, entropy)


def apply_plain_head(
    hidden: Tensor, head: Any, targets: Tensor, temperatures: Tensor, *, entropy_gradient: bool = False
) -> TokenLogprobs:
    """As `apply_head`, by calling the module: the gradient goes wherever autograd takes it.

    At most KEPT_BYTES of logits are kept for the backward pass; more are made again in it, block by block.
    """
    scaled = _cooled(hidden, temperatures)
    size = max(1, KEPT_BYTES // (head.out_features * scaled.element_size()))
    if len(scaled) <= size:
        return TokenLogprobs(*_plain_rows(scaled, targets, head, entropy_gradient))
    parts = []
    for start in range(0, len(scaled), size):
        rows = scaled[start : start + size], targets[start : start + size], head, entropy_gradient
        again = torch.is_grad_enabled()
        parts.append(checkpoint(_plain_rows, *rows, use_reentrant=False) if again else _plain_rows(*rows))
    logprobs, entropy = zip(*parts, strict=True)
    return TokenLogprobs(torch.cat(logprobs), torch.cat(entropy))


def _cooled(hidden: Tensor, temperatures: Tensor) -> Tensor:
    """Here and not at the logits, which are a hundred times as many."""
    return hidden if bool((temperatures == 1).all()) else hidden / temperatures[:, None]


def _plain_rows(x: Tensor, targets: Tensor, head: Any, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logits = head(x)
    total = logits.logsumexp(1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        entropy = total - (logits.softmax(1) * logits).sum(1)
    return logits.gather(1, targets[:, None])[:, 0] - total, entropy


class _Head(torch.autograd.Function):
    """Hidden states [N, H], head [V, H], targets [N] -> logprobs [N], entropy [N]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: JoinedLinear, targets: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        x = hidden.to(head.dtype)
        size = max(1, KEPT_BYTES // (head.out_features * x.element_size()))
        keeps = ctx.needs_input_grad[0] and len(x) <= size and not entropy_gradient
        kept = head.spare.take(len(x), head.out_features, x.dtype, x.device) if keeps else None
        logprobs, entropy, totals = _distributions(x, head, targets, kept)
        ctx.save_for_backward(hidden, x, targets, totals, *([] if kept is None else [kept]))
        ctx.head, ctx.size, ctx.entropy_gradient = head, size, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        hidden, x, targets, totals, *kept = ctx.saved_tensors
        head = ctx.head
        if ctx.entropy_gradient:
            return _back_with_entropy(x, head, targets, (grad, grad_entropy)).to(hidden.dtype), None, None, None
        share = (grad / totals).neg_()[:, None]
        grad_hidden = torch.empty_like(hidden)
        for start in range(0, len(x), ctx.size):
            part = slice(start, start + ctx.size)
            rests = kept[0] if kept else head.spare.take(len(x[part]), head.out_features, x.dtype, x.device)
            if not kept:
                _distributions(x[part], head, targets[part], rests)
            torch.mul(head.multiply_back(rests), share[part], out=grad_hidden[part])
            head.add_gradient(rests, (hidden[part] * share[part]).to(x.dtype))
            head.spare.give_back(rests)
        return grad_hidden, None, None, None


def _back_with_entropy(x: Tensor, head: JoinedLinear, targets: Tensor, grads: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of the hidden states, from those of logprobs and entropy."""
    size = max(1, CHUNK_BYTES // (head.out_features * head.weight.element_size()))
    pieces = []
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        column = targets[part, None]
        of_logprob, of_entropy = (grad[part, None] for grad in grads)
        logprobs = head.forward(x[part]).log_softmax(1)
        probabilities = logprobs.exp()
        entropy = -(probabilities * logprobs).sum(1, keepdim=True)
        back = -probabilities * (of_logprob + of_entropy * (logprobs + entropy))
        # 1 - p of the target as the sum of the others: near 1 a difference would be all rounding.
        others = probabilities.scatter(1, column, 0.0).sum(1, keepdim=True)
        own = probabilities.gather(1, column)
        surprise = logprobs.gather(1, column) + entropy
        back.scatter_(1, column, of_logprob * others - of_entropy * own * surprise)
        rounded = back.to(x.dtype)
        pieces.append(head.multiply_back(rounded))
        head.add_gradient(rounded, x[part])
    return torch.cat(pieces)


def _distributions(
    x: Tensor, head: JoinedLinear, targets: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropy and the sums of e, [N] each; r [N, V] goes to `kept`, in the dtype of x."""
    weight = head.weight
    logprobs, entropy, totals = (torch.empty(len(x), dtype=weight.dtype, device=x.device) for _ in range(3))
    size = max(1, CHUNK_BYTES // (head.out_features * weight.element_size()))
    tables = [head.spare.take(min(size, len(x)), head.out_features, weight.dtype, x.device) for _ in range(2)]
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        column = targets[part, None]
        rows = x[part]
        logits = head.forward(rows, out=tables[0][: len(rows)])
        logits -= logits.amax(1, keepdim=True)
        exponentials = torch.exp(logits, out=tables[1][: len(rows)])
        logit, own = logits.gather(1, column), exponentials.gather(1, column)
        others = exponentials.scatter_(1, column, 0).sum(1, keepdim=True)
        if kept is not None:
            kept[part] = exponentials.scatter_(1, column, -others)
        total = torch.add(others, own, out=totals[part, None])
        logprobs[part, None] = logit - total.log()
        # H = log sum exp(s) - sum p * s, with the logits shifted by their maximum.
        products = exponentials.mul_(logits).scatter_(1, column, own * logit)
        entropy[part] = (total.log() - products.sum(1, keepdim=True) / total)[:, 0]
    for table in tables:
        head.spare.give_back(table)
    return logprobs, entropy, totals
