"""Random models that speak the languages of chat families, and a record with one token changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from chat_families import tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.rollout import RolloutState, Segment, Tokens, unpack_ids


def save_random_model(directory: Path, *families: str, **fields: Any) -> None:
    """Over the tokens of all of these families; it ends its turns now and then."""
    tokenizers = [tokenizer_of(family) for family in families]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(families[0]))
        model = LlamaForCausalLM(
            LlamaConfig(
                **{
                    "vocab_size": max(tokenizer.vocab_size for tokenizer in tokenizers),
                    "hidden_size": 48,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "max_position_embeddings": 4096,
                    "initializer_range": 0.25,
                    "bos_token_id": None,
                    "eos_token_id": None,
                    "pad_token_id": None,
                    **fields,
                }
            )
        )
        with torch.no_grad():
            stops = sorted({stop for tokenizer in tokenizers for stop in tokenizer.stop_ids})
            model.lm_head.weight[stops] *= 3.0
    model.save_pretrained(directory)


def with_another_token(rollout: RolloutState, segment: int, place: int) -> RolloutState:
    changed = msgspec.structs.replace(rollout)
    tokens = rollout.segments[segment].tokens
    ids = unpack_ids(tokens.ids).copy()
    ids[place] = (ids[place] + 1) % 300
    own = Tokens(ids.tobytes(), tokens.logprobs, tokens.mask, tokens.steps)
    before = rollout.segments
    replaced = Segment(own, before[segment].parent, before[segment].start)
    changed.segments = (*before[:segment], replaced, *before[segment + 1 :])
    return changed
