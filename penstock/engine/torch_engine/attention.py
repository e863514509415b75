"""Attention over the cache (one new token per slot) and of a prompt over itself.

Shapes: n rows, h query heads, kv key-value heads, g = h / kv, d head dimension, L cached length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.torch_engine.cache import LENGTH_STEP


class UnknownAttention(Exception):
    """A model asks for more than softmax(q k) v."""


def decode_mask(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """n x 1 x 1 x L: 0 up to and including each row's position, -inf behind it."""
    behind = torch.arange(length, device=positions.device) > positions[:, None]
    mask = torch.zeros(behind.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(behind, -torch.inf)[:, None, None, :]


SHORT = 256
"""Cached tokens. torch's kernel is made for many queries: of few over so many, two plain products take half its time in
float32; over more, or in bfloat16, they take as long."""


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """query n x kv x g x d over n x kv x L x d. The g heads of one key-value head are taken as g queries,
    so keys and values are read once and never expanded."""
    if query.dtype == torch.float32 and query.device.type == "cpu" and keys.shape[2] <= SHORT:
        scaled = query * (query.shape[-1] ** -0.5 if scale is None else scale)
        scores = torch.matmul(scaled, keys.transpose(-1, -2)).add_(mask)
        return torch.matmul(scores.softmax(-1), values)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)


def attend_in_blocks(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """The same, with a row's bits independent of L.

    L follows the longest neighbour. A library's reduction over L may change its order with L, so the reductions here
    run over blocks of one fixed shape and the blocks are added in order: a fully masked block adds exactly 0.
    """
    n, kv, g, d = query.shape
    length, batch = keys.shape[2], n * kv
    scale = d**-0.5 if scale is None else scale
    folded = (query * scale).reshape(batch, g, d)
    # Contiguous blocks: the kernel must not see the cache's strides, which change when it grows.
    key_blocks = keys.reshape(batch, -1, LENGTH_STEP, d).transpose(0, 1).contiguous()
    value_blocks = values.reshape(batch, -1, LENGTH_STEP, values.shape[-1]).transpose(0, 1).contiguous()
    scores = torch.cat([torch.bmm(folded, block.transpose(1, 2)) for block in key_blocks], dim=-1)
    scores = scores.view(n, kv, g, length).float() + mask
    weights = (scores - scores.amax(-1, keepdim=True)).exp_().view(batch, g, -1, LENGTH_STEP)
    sums = weights.sum(-1)
    out = torch.zeros(batch, g, values.shape[-1], dtype=torch.float32, device=query.device)
    total = torch.zeros(batch, g, 1, dtype=torch.float32, device=query.device)
    for index, block in enumerate(value_blocks):
        out = out + torch.bmm(weights[:, :, index].contiguous().to(block.dtype), block)
        total = total + sums[:, :, index : index + 1]
    return (out / total).to(query.dtype).view(n, kv, g, -1)


def attend_prompt(query: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """query T x h x d at positions start.. over kv x (start + T) x d; causal. T x h x d."""
    tokens, heads, _ = query.shape
    repeats = heads // keys.shape[0]
    if repeats > 1:
        keys, values = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
    mask = None
    if start:
        places = torch.arange(start + tokens, device=query.device)
        mask = places[None, :] <= places[start:, None]
    folded = query.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask, is_causal=not start)
    return out[0].transpose(0, 1)


def block_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`attend_in_blocks` as transformers calls attention: query n x h x T x d, output n x T x h x d."""
    unknown = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    if unknown:
        raise UnknownAttention(f"wants {' and '.join(unknown)} in its attention")
    n, heads, tokens, d = query.shape
    kv, length = key.shape[1], key.shape[2]
    if tokens > 1:
        # A prompt is computed alone, so its bits depend on nothing else.
        repeats = heads // kv
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        causal = attention_mask is None
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, is_causal=causal, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    # No mask means that all rows are equally long; the same sums must be made as with one.
    mask = torch.zeros(n, 1, 1, length, device=query.device)
    if attention_mask is not None:
        shown = attention_mask[:, :, :, :length]
        mask = mask.masked_fill_(~shown, -torch.inf) if shown.dtype == torch.bool else mask + shown
    out = attend_in_blocks(query.view(n, kv, heads // kv, d), key, value, mask, scaling)
    return out.reshape(n, 1, heads, -1), None
