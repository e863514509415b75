"""Load a model to train, and find out what it can do by trying it on a few tokens.

Architectures differ in ways their configuration does not say (a scaled or capped logit, a mask that is rebuilt). So
the worker's own path is compared with the model's plain forward pass before anything is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from penstock.errors import ModelError
from penstock.learn.batch import TrainAnswer, TrainBatch, TrainGroup, TrainSegment
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.fused import FusedModel, can_fuse
from penstock.learn.head import TokenLogprobs
from penstock.learn.linear import Gradients
from penstock.learn.logprobs import PlainModel
from penstock.learn.lora import LoRAConfig, attach
from penstock.learn.pack import MicroBatch, pack
from penstock.learn.recompute import recompute_layers
from penstock.models.arithmetic import choose, work_of
from penstock.models.bfloat16 import has_fast_products
from penstock.models.context import attention_window
from penstock.models.load import load_causal_lm
from penstock.models.threads import Pace
from penstock.rollout import ROOT, IntArray

TOLERANCE = 1e-3
"""Of a logprob, between two orders of the same float32 sums."""
PROBE_TOKENS, LONG_PROBE_TOKENS = 18, 320
"""What a way is tried on. The long one costs as much as a micro-batch; it shows what a family does beyond a few hundred
tokens and does not name."""


class LogprobModel(Protocol):
    """A way from micro-batches to logprobs with a gradient, over the weights of a transformers model."""

    share_prompts: bool
    one_row: bool
    """How it wants its micro-batches packed."""
    dtype: torch.dtype
    """Of what matrix products are computed from."""
    module: Any
    """All of the forward pass as one module, of a way that can be sharded."""

    def refresh(self) -> None:
        """The weights have changed."""

    def logprobs(self, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenLogprobs: ...


def load_model(
    model_dir: Path, *, device: str = "cpu", activation_checkpointing: bool = False, lora: LoRAConfig | None = None
) -> Any:
    """A causal LM in float32 from a Hugging Face directory, without remote code and without dropout."""
    model = load_causal_lm(model_dir)
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device is {device!r}, which cannot be used here: {error}") from error
    # torch leaves the row of the padding token out of an embedding's gradient. Where a prompt or an answer holds that
    # token it is a token like any other (often it is the one that ends a turn), here and in the fused passes.
    embedding = model.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = None
    if lora is not None:
        attach(model, lora, str(model_dir))
    if activation_checkpointing:
        recompute_layers(model)
    model.eval()
    return model


def check_head(model: Any) -> None:
    """Raise ModelError unless hidden states times the output embedding are the model's logits."""
    head = model.get_output_embeddings()
    name = type(model).__name__
    if head is None or getattr(head, "bias", None) is not None:
        raise ModelError(f"{name} has no output embedding, or one with a bias; it cannot be trained")
    difference = _difference(model, PlainModel(model, share_prompts=False))
    if not difference < TOLERANCE:
        raise ModelError(
            f"{name}: logprobs from the output embedding differ from the model's own by {difference:.2g}; "
            "it changes its logits afterwards, which is not supported"
        )


def can_share_prompts(model: Any) -> bool:
    """Whether the model follows a mask of [rows, 1, length, length] and positions that restart."""
    config = model.config.get_text_config()
    # A custom mask is taken as it is, and a window measured along the row: both are wrong in rows longer than the one
    # tried here.
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if other_layers or attention_window(config) is not None:
        return False
    own = config._attn_implementation
    try:
        shares = _difference(model, PlainModel(model, share_prompts=True), LONG_PROBE_TOKENS) < TOLERANCE
    except (ValueError, RuntimeError, TypeError, IndexError, AttributeError):
        shares = False
    if not shares and config._attn_implementation != own:
        model.set_attn_implementation(own)
    return shares


def choose_way(
    model: Any,
    config: TrainWorkerConfig,
    gradients: Gradients,
    *,
    deterministic: bool,
    sharded: bool = False,
    pace: Pace | None = None,
) -> LogprobModel:
    """The fused one for models and dtypes it serves, as far as it agrees with the plain one; never for shards.

    `pace` is told of its passes.
    """
    fused = config.fused and can_fuse(model) and not sharded
    if fused:
        exact = FusedModel(model, gradients, torch.float32, share_prompts=config.share_prompts)
        fused = _difference(model, exact) < TOLERANCE
    rows = config.max_tokens_per_micro_batch
    work = work_of(model.config.get_text_config(), rows=rows, trains=True) if fused else None
    dtype = choose(config.dtype, work, deterministic=deterministic, device=config.device).torch_dtype
    if fused and (has_fast_products() or dtype == torch.float32):
        return FusedModel(
            model,
            gradients,
            dtype,
            share_prompts=config.share_prompts,
            activation_checkpointing=config.activation_checkpointing,
            pace=pace,
        )
    share_prompts = config.share_prompts and can_share_prompts(model)
    return PlainModel(model, dtype, share_prompts=share_prompts, pace=pace)


def _difference(model: Any, way: LogprobModel, length: int = PROBE_TOKENS) -> float:
    """Largest difference of a logprob between this way and the model's own forward pass, one segment at a time.

    The second answer has two segments, of which the second goes on from the middle of the first.
    """
    vocab = model.get_output_embeddings().weight.shape[0]
    length = min(length, getattr(model.config.get_text_config(), "max_position_embeddings", None) or length)
    ids = (np.arange(1, length + 1, dtype=np.int64) * 7919 % vocab).astype(np.int32)
    prompt, first, second, branch = np.split(ids, [length * 5 // 18, length // 2, length * 5 // 6])
    answers = [
        TrainAnswer("probe/0", 0.0, 0.0, [_probe(first, ROOT, len(prompt))]),
        TrainAnswer("probe/1", 0.0, 0.0, [_probe(second, ROOT, len(prompt)), _probe(branch, 0, 2)]),
    ]
    batch = TrainBatch(0, [TrainGroup("probe", prompt, answers)])
    plain = torch.cat([
        _plain_logprobs(model, prompt, first),
        _plain_logprobs(model, prompt, second),
        _plain_logprobs(model, np.concatenate([prompt, second[:2]]), branch),
    ])  # fmt: skip
    ours = torch.full_like(plain, torch.nan)
    with torch.no_grad():
        for micro_batch in pack(
            batch, max_tokens=max(256, length), share_prompts=way.share_prompts, one_row=way.one_row
        ):
            where = torch.from_numpy(micro_batch.token_index).to(ours.device)
            ours[where] = way.logprobs(micro_batch).logprobs.to(ours)
    # The maximum of a tensor is NaN when one of them is; Python's would pass over it.
    return (ours - plain).abs().max().item()


def _plain_logprobs(model: Any, context: IntArray, ids: IntArray) -> torch.Tensor:
    whole = torch.from_numpy(np.concatenate([context, ids]).astype(np.int64)).to(model.device)
    with torch.no_grad():
        table: torch.Tensor = model(input_ids=whole[None], use_cache=False).logits[0].float().log_softmax(-1)
    return table[:-1].gather(1, whole[1:, None])[len(context) - 1 :, 0]


def _probe(ids: IntArray, parent: int, start: int) -> TrainSegment:
    zeros = np.zeros(len(ids), dtype=np.float32)
    return TrainSegment(ids, zeros, zeros, np.ones(len(ids), np.uint8), np.zeros(len(ids), np.int32), parent, start)


def idle_micro_batch(way: LogprobModel) -> MicroBatch:
    """One token after another: the least that goes through a model."""
    one = np.zeros(1, dtype=np.int32)
    batch = TrainBatch(0, [TrainGroup("idle", one, [TrainAnswer("idle/0", 0.0, 0.0, [_probe(one, ROOT, 1)])])])
    [micro_batch] = pack(batch, max_tokens=1, share_prompts=way.share_prompts, one_row=way.one_row)
    return micro_batch
