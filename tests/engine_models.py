"""Tiny random models in directories, and what an engine that serves them may be asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_contract import CharacterTokenizer, Subject, Tensors
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from penstock.engine import EmbeddedEngineConfig

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_model(kind: str) -> Any:
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=32, tie_word_embeddings=True))
    if kind == "llama-scaled":
        rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        config = LlamaConfig(**SHAPE, rope_parameters=rope, attention_bias=True, mlp_bias=True)
        return LlamaForCausalLM(config)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True))
    assert kind == "gpt2"
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=96,
            n_embd=48,
            n_layer=2,
            n_head=4,
            n_positions=2048,
            initializer_range=0.25,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def write_model(kind: str, directory: Path, *, seed: int = 0) -> None:
    """The same weights for the same seed."""
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(kind)
        for name, parameter in model.named_parameters():
            # Biases start at 0 and norms at 1; both would hide a mistake.
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
            assert parameter.isfinite().all(), name
        model.save_pretrained(directory)


def write_tokenizer(directory: Path) -> None:
    """The tokenizer that `CharacterTokenizer` is, with an end-of-text that is never made."""
    vocabulary = {chr(32 + i): i for i in range(96)} | {"<end>": 96}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(directory)


def make_subject(model_dir: Path, model: Any, **fields: Any) -> Subject:
    def reference(ids: Any, temperature: float) -> np.ndarray:
        with torch.inference_mode():
            logits = model(torch.tensor([list(ids)])).logits[0].float()
        return torch.log_softmax(logits / temperature, -1).numpy()

    generator = torch.Generator().manual_seed(99)
    other = {
        name: weight + 0.2 * torch.randn(weight.shape, generator=generator)
        for name, weight in model.state_dict().items()
    }

    def make() -> Any:
        config = EmbeddedEngineConfig(max_running=6, prefill_chunk_tokens=64, **fields)
        return config.build(str(model_dir), CharacterTokenizer(), threads=1)

    return Subject(make=make, other_weights=Tensors(other), reference=reference)
