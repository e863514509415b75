"""Logits and one uniform number per row become one token and its logprob per row.

A row's i-th uniform is a function of (seed, i) alone, so an answer does not depend on who is sampled beside it and a
continued answer goes on where it stopped. The token is found by inverting the CDF in two levels: sums of blocks of 128
tokens, then the tokens of one block; so no draw is made for every token. What may not be drawn, forbidden or cut, has
the logit -inf by then; the logprob is that among all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.torch_engine.scratch import Scratch
from penstock.models.kernels import BLOCK, Kernels

_MASK = (1 << 64) - 1
_FAINT = 1e-10
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser: a bijection whose output bits look independent."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fold_seed(seed: int) -> np.uint64:
    return np.uint64(seed & _MASK)


def uniforms(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The number at each (seed, index), in [0, 1) with 53 bits."""
    # Seeds are mixed first: neighbouring seeds must not give the same sequence, shifted.
    state = _mix(seeds + _GOLDEN) + indices.astype(np.uint64) * _GOLDEN
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Sampling:
    """How each row of one step is sampled. All arrays have one entry per row."""

    temperature: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float64]
    forbidden: dict[int, list[int]]
    """Rows that may not end yet, and the ids they may not draw."""
    truncated: dict[int, tuple[float, int, float]]
    """Rows that cut the distribution: (top_p, top_k, min_p)."""


def sample(
    logits: Tensor, how: Sampling, scratch: Scratch | None = None, kernels: Kernels | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """A token per row and its logprob under softmax(logits / temperature), whatever was cut or forbidden.

    A row whose logits are not all finite has logprob NaN; its token means nothing.
    Overwrites `logits` (float32 or bfloat16, rows x vocabulary).
    """
    scale = np.where(how.temperature == 0, np.float32(1), how.temperature)
    if (scale != 1).any():
        logits = logits.float().div_(torch.from_numpy(scale).to(logits.device)[:, None])
    sums, top = _block_sums(logits, scratch, kernels)
    log_total = sums.sum(-1, dtype=torch.float64).log() + top.double()

    if how.forbidden:
        _forbid(logits, sums, top, how.forbidden)
    if how.truncated:
        changed = list(how.truncated)
        logits[changed] = _cut(logits[changed], list(how.truncated.values()))
        sums[changed], top[changed] = _block_sums(logits[changed])

    row = torch.arange(len(logits), device=logits.device)
    uniform = torch.from_numpy(how.uniform).to(logits.device)
    ids = invert_cdf(sums, uniform, lambda blocks: _weights_in(logits, top, row, blocks))
    greedy = np.flatnonzero(how.temperature == 0)
    if len(greedy):
        chosen = torch.from_numpy(greedy).to(logits.device)
        ids[chosen] = logits[chosen].argmax(-1)
    ids.clamp_(max=logits.shape[1] - 1)  # Only a row of NaN can point behind the vocabulary.
    logprobs = (logits[row, ids].double() - log_total).float()
    return ids.cpu().numpy(), logprobs.cpu().numpy()


def target_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Of one given token per row, under softmax(logits)."""
    logits = logits.float()
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def invert_cdf(sums: Tensor, uniform: Tensor, weights_in: Callable[[Tensor], Tensor]) -> Tensor:
    """The index where the running sum of each row's weights passes uniform * total; never one of weight 0.

    `sums` is rows x blocks, at least one of each row positive; `weights_in` gives the `BLOCK` weights of one block of
    each row.
    """
    row = torch.arange(len(sums), device=sums.device)
    running = sums.double().cumsum(-1)
    total = running[:, -1]
    # A target equal to the total would lie behind the last token.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(running, target[:, None], right=True)[:, 0].clamp_(max=sums.shape[1] - 1)
    before = torch.where(block > 0, running[row, (block - 1).clamp(min=0)], 0.0)
    inner = weights_in(block).double().cumsum(-1)
    # Block sums are float32: the rest may exceed this block's exact sum, then its last token with weight is meant.
    last = inner[:, -1:]
    rest = torch.minimum((target - before)[:, None], torch.nextafter(last, torch.zeros_like(last)))
    offset = torch.searchsorted(inner, rest, right=True)[:, 0].clamp_(max=BLOCK - 1)
    return block * BLOCK + offset


def _weights_in(logits: Tensor, top: Tensor, rows: Tensor, blocks: Tensor) -> Tensor:
    """exp(logit - top) of the tokens of one block of each of these rows; 0 behind the vocabulary."""
    vocabulary = logits.shape[1]
    tokens = blocks[:, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
    found = logits[rows[:, None], tokens.clamp(max=vocabulary - 1)].float()
    return found.sub_(top[rows, None]).exp_().masked_fill_(tokens >= vocabulary, 0)


def _forbid(logits: Tensor, sums: Tensor, top: Tensor, forbidden: dict[int, list[int]]) -> None:
    """No forbidden token can be drawn any more: they are gone from the logits, and from the sums of their blocks."""
    pairs = [(row, token) for row, banned in forbidden.items() for token in banned if token < logits.shape[1]]
    if not pairs:
        return
    rows, tokens = torch.tensor(pairs, device=logits.device).unbind(1)
    logits[rows, tokens] = -torch.inf
    blocks = tokens // BLOCK
    sums[rows, blocks] = _weights_in(logits, top, rows, blocks).sum(-1)
    changed = torch.tensor(list(forbidden), device=logits.device)
    # Beside what was forbidden the rest vanished: it is summed anew, relative to its own largest.
    faint = changed[sums[changed].sum(-1) < _FAINT]
    if len(faint):
        sums[faint], top[faint] = _block_sums(logits[faint])


def _block_sums(
    logits: Tensor, scratch: Scratch | None = None, kernels: Kernels | None = None
) -> tuple[Tensor, Tensor]:
    """Of each row, the sum of exp(logits - max) of each block, and the max; in float32."""
    if kernels is not None:
        return kernels.sum_blocks(logits)
    rows, vocabulary = logits.shape
    padded = -(-vocabulary // BLOCK) * BLOCK
    weights = (scratch or Scratch(logits.device)).take(rows, padded)
    top = logits.amax(-1).float()
    weights[:, vocabulary:] = 0
    weights[:, :vocabulary].copy_(logits).sub_(top[:, None]).exp_()
    return weights.view(rows, -1, BLOCK).sum(-1), top


def _cut(logits: Tensor, cuts: list[tuple[float, int, float]]) -> Tensor:
    """-inf for the tail: top_k first, top_p on what is left, then min_p relative to the most likely."""
    device = logits.device
    columns = zip(*cuts, strict=True)
    top_p, top_k, min_p = (torch.tensor(column, dtype=torch.float64, device=device)[:, None] for column in columns)
    weights = (logits.double() - logits.amax(-1, keepdim=True).double()).exp_()
    ordered, places = weights.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(weights.shape[1], device=device)
    kept = torch.where((top_k == 0) | (rank < top_k), ordered, 0.0)
    before = kept.cumsum(-1) - kept
    # top_p 1 must keep everything, though the running sum may round up to the total before the end.
    inside = (before < top_p * kept.sum(-1, keepdim=True)) | (top_p >= 1)
    stays = inside & (kept > 0) & (ordered >= min_p * ordered[:, :1])
    return logits.masked_fill(torch.zeros_like(stays).scatter_(-1, places, ~stays), -torch.inf)
