from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
)

from penstock.errors import ModelError
from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.learner import Learner
from penstock.learn.load import load_model
from penstock.learn.logprobs import PlainModel
from penstock.learn.pack import pack
from penstock.learn.recompute import recompute_layers
from penstock.learn.step_metrics import outcome
from penstock.rollout import Group

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
SIZES = {"vocab_size": 97, "hidden_size": 32, "initializer_range": 0.2, **SPECIAL}
ATTENTION = {"num_hidden_layers": 2, "num_attention_heads": 4}

# Each with the dropout that its family is published with, and more.
FAMILIES: dict[str, Any] = {
    "falcon": FalconConfig(**SIZES, **ATTENTION, hidden_dropout=0.3, attention_dropout=0.3),
    "falcon-alibi": FalconConfig(**SIZES, **ATTENTION, alibi=True, hidden_dropout=0.3, attention_dropout=0.3),
    "bloom": BloomConfig(**SIZES, n_layer=2, n_head=4, hidden_dropout=0.3, attention_dropout=0.3),
    "opt": OPTConfig(**{**SIZES, "init_std": 0.2}, **ATTENTION, ffn_dim=48, word_embed_proj_dim=32, dropout=0.3),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.3, attn_pdrop=0.3, **SPECIAL),
    "gpt-neox": GPTNeoXConfig(**SIZES, **ATTENTION, intermediate_size=48, hidden_dropout=0.3, attention_dropout=0.3),
    "llama": LlamaConfig(**SIZES, **ATTENTION, intermediate_size=48, attention_dropout=0.3),
}


@pytest.fixture
def batch(random_groups: Callable[..., list[Group]]) -> TrainBatch:
    return prepare_batch(random_groups(7, num_groups=2), train_step=1)


@pytest.fixture(params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(tmp_path)
    return tmp_path


def gradients(model: Any, batch: TrainBatch) -> dict[str, torch.Tensor]:
    way = PlainModel(model, share_prompts=False)
    for micro_batch in pack(batch, max_tokens=256, share_prompts=False, one_row=False):
        (way.logprobs(micro_batch).logprobs * torch.from_numpy(micro_batch.advantages)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_layers_that_are_computed_again_give_the_same_gradient(model_dir: Path, batch: TrainBatch) -> None:
    plain = gradients(load_model(model_dir), batch)
    again = gradients(load_model(model_dir, activation_checkpointing=True), batch)
    assert again.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    assert any(gradient.abs().max() > 1e-3 for gradient in plain.values())


def test_a_layer_keeps_its_input_and_nothing_else_until_the_backward_pass(model_dir: Path, batch: TrainBatch) -> None:
    def kept(model: Any) -> int:
        total = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        ids = torch.from_numpy(np.concatenate([segment.ids for segment in batch.segments])).long()[None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.base_model(input_ids=ids, use_cache=False)
        return total

    assert kept(load_model(model_dir, activation_checkpointing=True)) < kept(load_model(model_dir)) / 2


@pytest.mark.parametrize("model_dir", ["falcon", "bloom", "opt"], indirect=True)
def test_a_step_is_the_same_with_and_without_recomputing(model_dir: Path, batch: TrainBatch) -> None:
    steps = []
    for recomputing in (False, True):
        config = TrainWorkerConfig(lr=1e-3, activation_checkpointing=recomputing)
        learner = Learner(config, model_dir, total_steps=2, threads=1)
        steps.append(outcome([learner.train(batch, threading.Event())]).metrics)
    for key in ("loss", "grad_norm", "entropy"):
        assert steps[1][key] == pytest.approx(steps[0][key], rel=1e-5), key


def test_a_model_without_such_layers_is_refused_with_the_way_out() -> None:
    with pytest.raises(ModelError, match=r"no layer of Linear that can be computed again; set it to False"):
        recompute_layers(torch.nn.Linear(2, 2))
