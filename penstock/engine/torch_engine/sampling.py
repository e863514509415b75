"""Logits and one uniform number per row become one token and its logprob per row.

A row's i-th uniform is a function of (seed, i) alone, so an answer does not depend on who is sampled beside it and a
continued answer goes on where it stopped. The token is found by inverting the CDF in two levels: sums of blocks of 128
tokens, then the tokens of one block; so the vocabulary is read twice and no vocabulary-wide random draw is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.torch_engine.kernels import Kernels
from penstock.engine.torch_engine.scratch import Scratch

BLOCK = 128
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
    Overwrites `logits` (float32, rows x vocabulary).
    """
    rows = logits.shape[0]
    greedy = np.flatnonzero(how.temperature == 0)
    scale = np.where(how.temperature == 0, np.float32(1), how.temperature)
    if (scale != 1).any():
        logits /= torch.from_numpy(scale).to(logits.device)[:, None]
    weights, sums, top = _exponentials(logits, scratch, kernels)
    log_total = sums.sum(-1, dtype=torch.float64).log() + top.double()

    if how.forbidden:
        _forbid(logits, weights, sums, how.forbidden)
    if how.truncated:
        changed = list(how.truncated)
        weights[changed] = _cut(weights[changed], list(how.truncated.values()))
        sums[changed] = _block_sums(weights[changed])

    ids = invert_cdf(weights, sums, torch.from_numpy(how.uniform).to(logits.device))
    if len(greedy):
        chosen = torch.from_numpy(greedy).to(logits.device)
        ids[chosen] = logits[chosen].argmax(-1)
        for row in how.forbidden.keys() & set(greedy.tolist()):
            ids[row] = _without(logits[row], how.forbidden[row]).argmax()
    ids.clamp_(max=logits.shape[1] - 1)  # Only a row of NaN can point into the padding.
    picked = logits[torch.arange(rows, device=logits.device), ids].double()
    logprobs = (picked - log_total).float()
    return ids.cpu().numpy(), logprobs.cpu().numpy()


def target_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Of one given token per row, under softmax(logits)."""
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def invert_cdf(weights: Tensor, sums: Tensor, uniform: Tensor) -> Tensor:
    """The index where the running sum of each row's weights passes uniform * total; never one of weight 0.

    `weights` is rows x (blocks * BLOCK), at least one positive per row; `sums` its block sums.
    """
    rows, blocks = sums.shape
    row = torch.arange(rows, device=weights.device)
    running = sums.double().cumsum(-1)
    total = running[:, -1]
    # A target equal to the total would lie behind the last token.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(running, target[:, None], right=True)[:, 0].clamp_(max=blocks - 1)
    before = torch.where(block > 0, running[row, (block - 1).clamp(min=0)], 0.0)
    inner = weights.view(rows, blocks, BLOCK)[row, block].double().cumsum(-1)
    # Block sums are float32: the rest may exceed this block's exact sum, then its last token with weight is meant.
    last = inner[:, -1:]
    rest = torch.minimum((target - before)[:, None], torch.nextafter(last, torch.zeros_like(last)))
    offset = torch.searchsorted(inner, rest, right=True)[:, 0].clamp_(max=BLOCK - 1)
    return block * BLOCK + offset


def _forbid(logits: Tensor, weights: Tensor, sums: Tensor, forbidden: dict[int, list[int]]) -> None:
    """Take the weight from forbidden tokens, and from the sums of their blocks."""
    pairs = [(row, token) for row, banned in forbidden.items() for token in banned if token < logits.shape[1]]
    if not pairs:
        return
    rows, tokens = torch.tensor(pairs, device=logits.device).unbind(1)
    weights[rows, tokens] = 0
    blocks = tokens // BLOCK
    sums[rows, blocks] = weights.view(len(weights), -1, BLOCK)[rows, blocks].sum(-1)
    changed = list(forbidden)
    for row in (row for row, left in zip(changed, sums[changed].sum(-1).tolist(), strict=True) if left < _FAINT):
        # Beside what was forbidden the rest vanished: its weights are made anew, relative to its own largest.
        weights[row], sums[row], _ = _exponentials(_without(logits[row], forbidden[row])[None])


def _without(logits: Tensor, banned: list[int]) -> Tensor:
    left = logits.clone()
    left[[token for token in banned if token < len(left)]] = -torch.inf
    return left


def _exponentials(
    logits: Tensor, scratch: Scratch | None = None, kernels: Kernels | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logits - max) padded with zeros to whole blocks, the sum of each block, and the max."""
    rows, vocabulary = logits.shape
    padded = -(-vocabulary // BLOCK) * BLOCK
    weights = (scratch or Scratch(logits.device)).take(rows, padded)
    if kernels is not None:
        return (weights, *kernels.exponentials(logits, weights, BLOCK))
    top = logits.amax(-1)
    weights[:, vocabulary:] = 0
    torch.sub(logits, top[:, None], out=weights[:, :vocabulary])
    weights[:, :vocabulary].exp_()
    return weights, _block_sums(weights), top


def _block_sums(weights: Tensor) -> Tensor:
    return weights.view(weights.shape[0], -1, BLOCK).sum(-1)


def _cut(weights: Tensor, cuts: list[tuple[float, int, float]]) -> Tensor:
    """Weights with the tail set to 0: top_k first, top_p on what is left, then min_p relative to the most likely."""
    device = weights.device
    top_p, top_k, min_p = (torch.tensor(column, device=device)[:, None] for column in zip(*cuts, strict=True))
    ordered, places = weights.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(weights.shape[1], device=device)
    kept = torch.where((top_k == 0) | (rank < top_k), ordered, 0.0).double()
    before = kept.cumsum(-1) - kept
    # top_p 1 must keep everything, though the running sum may round up to the total before the end.
    inside = (before < top_p.double() * kept.sum(-1, keepdim=True)) | (top_p >= 1)
    kept = torch.where(inside & (ordered >= min_p * ordered[:, :1]), kept, 0.0)
    return torch.zeros_like(weights).scatter_(-1, places, kept.float())
