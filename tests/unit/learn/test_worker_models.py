"""Which models a worker trains, on which device and in which arithmetic."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from penstock.errors import ModelError
from penstock.learn.batch import TrainBatch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.load import can_share_prompts, check_head
from penstock.models.context import attention_window

from .worker_parts import go_on, new_worker, scores_of, state_of, train

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        new_worker(tmp_path)


def test_a_model_that_lacks_weights_is_refused(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "partial")
    weights = load_file(model_dir / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "partial" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, among them model\.norm\.weight"):
        new_worker(tmp_path / "partial")


def test_a_sliding_window_is_trained_without_sharing_prompts() -> None:
    config = MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4, pad_token_id=0)
    model = MistralForCausalLM(config).eval()
    check_head(model)
    assert not can_share_prompts(model)


@pytest.mark.parametrize(
    "named", [True, False], ids=["a window that the configuration names", "a window that only the layers know"]
)
def test_local_attention_is_trained_without_sharing_prompts(named: bool) -> None:
    """Its window of 64 tokens is measured along the row, where other answers stand between an answer and its prompt."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 512, "vocab_size": 50}
    layers = {"attention_types": [[["global", "local"], 1]], "window_size": 64, "initializer_range": 0.3}
    model = GPTNeoForCausalLM(GPTNeoConfig(**shape, **layers, bos_token_id=0, eos_token_id=0)).eval()
    if not named:
        model.config.attention_layers = ["global", "global"]
    assert attention_window(model.config) == (64 if named else None)
    check_head(model)
    assert not can_share_prompts(model)


def test_a_model_with_learned_positions_may_share_prompts() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()
    check_head(model)
    assert can_share_prompts(model)


def test_a_model_with_weights_that_are_not_numbers_is_refused(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ModelError, match="by nan"):
        check_head(model)


def test_a_model_that_scales_its_logits_is_refused() -> None:
    torch.manual_seed(0)
    config = CohereConfig(**SMALL, logit_scale=0.1, initializer_range=0.5, pad_token_id=0)
    with pytest.raises(ModelError, match="changes its logits afterwards"):
        check_head(CohereForCausalLM(config).eval())


def test_a_device_that_is_not_there_is_refused_by_name(model_dir: Path) -> None:
    with pytest.raises(ModelError, match="device is 'warp', which cannot be used here"):
        new_worker(model_dir, device="warp")


def _gradient(model_dir: Path, batch: TrainBatch, **fields: Any) -> torch.Tensor:
    """That of a first step, read from the optimiser's first moment."""
    worker = new_worker(model_dir, max_grad_norm=1e9, **fields)
    train(worker, batch)
    assert {str(tensor.dtype) for _, tensor in worker.weights.tensors()} == {"torch.float32"}
    return torch.cat([v.flatten() for key, v in state_of(worker).items() if key.startswith("exp_avg.")])


@pytest.mark.parametrize("fused", [True, False])
def test_bfloat16_gives_nearly_the_gradient_of_float32_and_keeps_float32_weights(
    model_dir: Path, batch: TrainBatch, fused: bool
) -> None:
    exact = _gradient(model_dir, batch, fused=fused)
    rounded = _gradient(model_dir, batch, fused=fused, dtype="bfloat16")
    assert not torch.equal(exact, rounded)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.995
    assert float(rounded.norm()) == pytest.approx(float(exact.norm()), rel=0.05)


def test_bfloat16_logprobs_are_near_those_of_float32(model_dir: Path, batch: TrainBatch) -> None:
    exact, rounded = (np.concatenate(scores_of(new_worker(model_dir, dtype=d), batch)) for d in ("float32", "bfloat16"))
    # Logits of this model reach 10; bfloat16 has 8 bits.
    assert np.abs(exact - rounded).mean() < 0.03
    assert np.abs(exact - rounded).max() < 0.2


@pytest.mark.parametrize(("fused", "deterministic"), [(True, False), (True, True), (False, False)])
def test_auto_is_what_was_faster_for_the_fused_passes_of_a_run_that_need_not_be_deterministic(
    fused: bool, deterministic: bool, model_dir: Path, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.models.arithmetic.try_out", lambda work: {"float32": 2.0, "bfloat16": 1.0})
    config = TrainWorkerConfig(dtype="auto", fused=fused)
    worker = config.build(model_dir, total_steps=10, threads=1, deterministic=deterministic)
    assert train(worker, batch)["bfloat16"] == (fused and not deterministic)


def test_weights_that_are_loaded_count_in_bfloat16_at_once(model_dir: Path, batch: TrainBatch) -> None:
    worker, twin = new_worker(model_dir, dtype="bfloat16"), new_worker(model_dir, dtype="bfloat16")
    before = np.concatenate(scores_of(worker, batch))
    train(worker, batch)
    go_on(worker, twin)
    after = np.concatenate(scores_of(twin, batch))
    assert (after != before).any()
    assert np.array_equal(after, np.concatenate(scores_of(worker, batch)))
