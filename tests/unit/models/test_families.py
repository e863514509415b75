"""Models like Llama, read without the modules of transformers: the same names, shapes, weights and angles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from penstock.engine import EmbeddedEngineConfig
from penstock.engine.torch_engine.build import load_model
from penstock.engine.torch_engine.forward import FusedModel
from penstock.errors import ModelError
from penstock.models.families import (
    EMBEDDING,
    HEAD,
    Described,
    describe,
    is_like_llama,
    is_tied,
    parameter_shapes,
    read_weights,
    rotary_frequencies,
)
from penstock.models.load import load_causal_lm

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, wide heads": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3, biases": {"attention_bias": True},
}


def make(kind: str, **fields: Any) -> Any:
    logging.disable_progress_bar()
    config = AutoConfig.for_model(kind.partition(",")[0], **SMALL, **KINDS[kind], **fields)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_models_weights_are_read_as_transformers_has_them(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = AutoConfig.from_pretrained(tmp_path)
    expected = dict(model.named_parameters())
    assert is_like_llama(config)
    assert parameter_shapes(config) == {name: tuple(weight.shape) for name, weight in expected.items()}
    found = read_weights(tmp_path, config)
    assert found is not None and found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "llama, biases", "llama, wide heads"])
def test_the_file_of_a_llama_describes_it_as_transformers_does(kind: str, tmp_path: Path) -> None:
    make(kind).config.save_pretrained(tmp_path)
    found, expected = describe(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert isinstance(found, Described)
    assert is_like_llama(found) and parameter_shapes(found) == parameter_shapes(expected)
    assert {name: getattr(expected, name) for name in vars(found) if hasattr(expected, name)}.items() >= {
        name: value for name, value in vars(found).items() if name not in ("dtype", "transformers_version")
    }.items()


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": None},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"model_type": "qwen2"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_file_that_says_more_or_less_is_read_by_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    make("llama").config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert isinstance(describe(tmp_path), PreTrainedConfig)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_positions_turn_as_in_transformers(rope: dict[str, Any]) -> None:
    model = make("llama", rope_parameters=rope, max_position_embeddings=256)
    frequencies, factor = rotary_frequencies(model.config)
    assert torch.equal(frequencies, model.model.rotary_emb.inv_freq)
    assert factor == model.model.rotary_emb.attention_scaling


def test_an_output_embedding_of_its_own_counts_more_than_the_configuration(tmp_path: Path) -> None:
    model = make("qwen2").bfloat16()
    model.save_pretrained(tmp_path)
    config, file = AutoConfig.from_pretrained(tmp_path), tmp_path / "model.safetensors"
    weights = load_file(file)
    found = read_weights(tmp_path, config)
    assert found is not None and HEAD not in found and found[EMBEDDING].dtype == torch.bfloat16
    save_file(weights | {HEAD: weights[EMBEDDING].clone()}, file)
    found = read_weights(tmp_path, config)
    assert found is not None and is_tied(config, found)
    save_file(weights | {HEAD: weights[EMBEDDING] + 1}, file)
    assert read_weights(tmp_path, config) is None
    loaded, _ = load_model(EmbeddedEngineConfig(), str(tmp_path), deterministic=False)
    assert isinstance(loaded, FusedModel)
    assert torch.equal(loaded._head, load_causal_lm(tmp_path).get_output_embeddings().weight)


def test_files_that_hold_the_weights_in_another_way_are_left_to_transformers(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    config, file = AutoConfig.from_pretrained(tmp_path), tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({name: weight for name, weight in weights.items() if name != "model.norm.weight"}, file)
    assert read_weights(tmp_path, config) is None
    with pytest.raises(ModelError, match=r"lacks 1 weights, among them model\.norm\.weight; they would be random"):
        load_causal_lm(tmp_path)
    save_file(weights | {"model.norm.weight": torch.ones(31)}, file)
    assert read_weights(tmp_path, config) is None
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_causal_lm(tmp_path)
    file.unlink()
    assert read_weights(tmp_path, config) is None


def test_a_tied_model_whose_weights_have_other_names_is_left_to_transformers(tmp_path: Path) -> None:
    model = make("llama, tied")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    # As the bare model is saved, without its head.
    save_file({name.removeprefix("model."): weight for name, weight in load_file(file).items()}, file)
    assert read_weights(tmp_path, AutoConfig.from_pretrained(tmp_path)) is None
    loaded, _ = load_model(EmbeddedEngineConfig(), str(tmp_path), deterministic=False)
    assert isinstance(loaded, FusedModel)
    assert torch.equal(loaded._head, model.get_output_embeddings().weight)


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("llama", "transformers"),
        pytest.param("qwen3", "transformers.modeling_utils", marks=pytest.mark.long_tier),
    ],
)
def test_an_engine_of_such_a_model_starts_without_the_modules_of_transformers(
    kind: str, module: str, tmp_path: Path
) -> None:
    make(kind).save_pretrained(tmp_path)
    program = (
        "import sys; from penstock.engine import EmbeddedEngineConfig; "
        "from penstock.engine.torch_engine.build import load_model; "
        f"load_model(EmbeddedEngineConfig(), {str(tmp_path)!r}, deterministic=False); "
        f"assert {module!r} not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
