"""The model's logprobs of the tokens of a micro-batch, with their gradient, without a vocabulary's width of logits
for every token at once.

The base model makes hidden states; the head is applied only where a token is predicted, in chunks. Logits are float32
whatever the base model computes in: rounded to bfloat16 they are off by hundredths, and the ratio of two policies
would be made of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.learn.pack import MicroBatch

CHUNK_BYTES = 256 * 2**20
"""Size of the largest block of logits that lives at a time."""


@dataclass(frozen=True)
class TokenLogprobs:
    logprobs: Tensor
    entropy: Tensor
    """Of the whole distribution the token was drawn from; without gradient."""


def compute_logprobs(
    model: Any, micro_batch: MicroBatch, *, temperature: float, share_prompts: bool, autocast: torch.dtype | None = None
) -> TokenLogprobs:
    """log_softmax(logits / temperature) of every target of the micro-batch.

    `model` is a transformers causal LM. Without `share_prompts` every row is one prompt and one answer, and the model
    only needs to know a padding mask.
    """
    blocks, branches = torch.from_numpy(micro_batch.blocks), torch.from_numpy(micro_batch.branches)
    head = model.get_output_embeddings().weight
    device = head.device
    mask = block_mask(blocks, branches, head.dtype) if share_prompts else (blocks >= 0).long()
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        hidden = model.base_model(
            input_ids=torch.from_numpy(micro_batch.input_ids).to(device),
            attention_mask=mask.to(device),
            position_ids=torch.from_numpy(micro_batch.position_ids).to(device),
            use_cache=False,
        ).last_hidden_state
    picked = hidden.flatten(0, 1).index_select(0, torch.from_numpy(micro_batch.predicting).to(device)).to(head.dtype)
    targets = torch.from_numpy(micro_batch.targets).to(device)
    logprobs, entropy = _ChunkedHead.apply(picked, head, targets, temperature)  # type: ignore[no-untyped-call]
    return TokenLogprobs(logprobs, entropy)


def block_mask(blocks: Tensor, branches: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive [rows, 1, length, length]: 0 where a cell sees another, -inf where not. Every cell sees itself."""
    same_block = blocks[:, :, None] == blocks[:, None, :]
    of_prompt = branches[:, None, :] == 0
    same_branch = branches[:, :, None] == branches[:, None, :]
    seen = (same_block & (of_prompt | same_branch)).tril_()
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None]


class _ChunkedHead(torch.autograd.Function):
    """Hidden states [N, H], head [V, H], targets [N] -> logprobs [N], entropy [N].

    When all N fit one chunk its probabilities are kept for the backward pass, which then peaks no higher than a pass
    in chunks; otherwise each chunk is computed again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        size = max(1, CHUNK_BYTES // (head.shape[0] * head.element_size()))
        logprobs, entropy = torch.empty_like(hidden[:, 0]), torch.empty_like(hidden[:, 0])
        kept = None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            shifted, probabilities, total = _softmax(hidden[part], head, temperature)
            log_total = total.log()
            logprobs[part] = shifted.gather(1, targets[part, None])[:, 0] - log_total
            # H = log sum exp(s) - sum p * s, with the logits shifted by their maximum.
            entropy[part] = log_total - torch.linalg.vecdot(probabilities, shifted)
            kept = probabilities if len(hidden) <= size and ctx.needs_input_grad[0] else None
        ctx.save_for_backward(hidden, head, targets, *([] if kept is None else [kept]))
        ctx.temperature, ctx.size = temperature, size
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, head, targets, *kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.size):
            part = slice(start, start + ctx.size)
            probabilities = kept[0] if kept else _softmax(hidden[part], head, ctx.temperature)[1]
            scaled = grad[part] / ctx.temperature
            # d logprob / d logits = onehot(target) - probabilities; written over the probabilities.
            grad_logits = probabilities.mul_(-scaled[:, None])
            grad_logits.scatter_add_(1, targets[part, None], scaled[:, None])
            torch.mm(grad_logits, head, out=grad_hidden[part])
            if grad_head is not None:
                grad_head.addmm_(grad_logits.T, hidden[part])
        return grad_hidden, grad_head, None, None


def _softmax(hidden: Tensor, head: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits minus their maximum, their softmax, and the sum of exponentials that normalised it."""
    logits = hidden @ head.T
    if temperature != 1.0:
        logits /= temperature
    logits -= logits.amax(1, keepdim=True)
    exponentials = logits.exp()
    total = exponentials.sum(1)
    return logits, exponentials.div_(total[:, None]), total
