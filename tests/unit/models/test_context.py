from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from penstock.models import context_note, model_context
from penstock.models.context import rope_limit
from penstock.models.load import load_causal_lm

LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}


def long_phi(**fields: Any) -> Phi3ForCausalLM:
    """A Phi-3 of 48 positions that was stretched to 256."""
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=48,
        rope_parameters=LONGROPE | {"original_max_position_embeddings": 48},
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **fields,
    )
    return Phi3ForCausalLM(config).eval()


def dynamic_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "initializer_range": 0.25, "max_position_embeddings": 48}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, rope_parameters=rope)).eval()


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 48}},
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 48},
        {"rope_scaling": {"type": "su", "long_factor": [8.0] * 4}, "original_max_position_embeddings": 48},
        {"rope_parameters": {"full_attention": LONGROPE | {"original_max_position_embeddings": 48}}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 48}},
    ],
)
def test_where_positions_turn_otherwise_in_long_sequences_the_context_ends_before(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 256, **fields}))
    assert model_context(tmp_path) == 48
    note = context_note(tmp_path)
    assert note is not None
    assert "48" in note
    assert "256" in note


def test_other_ropes_leave_the_context_as_it_is(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 256, "rope_parameters": yarn}))
    assert model_context(tmp_path) == 256
    assert context_note(tmp_path) is None


def test_the_rule_reads_configurations_of_transformers_too(tmp_path: Path) -> None:
    long_phi().config.save_pretrained(tmp_path)
    assert rope_limit(AutoConfig.from_pretrained(tmp_path).to_dict()) == model_context(tmp_path) == 48


@pytest.mark.parametrize("make", [long_phi, dynamic_llama])
def test_a_loaded_models_rows_do_not_change_with_the_length_of_their_neighbours(tmp_path: Path, make: Any) -> None:
    """transformers takes the frequencies of a whole batch from its largest position."""
    make().save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path).eval()
    ids = torch.arange(2 * 64).reshape(2, 64) * 37 % 96
    with torch.no_grad():
        alone = model(input_ids=ids[:1, :32]).logits
        positions = torch.stack([torch.arange(32), torch.arange(32, 64)])
        beside = model(input_ids=ids[:, :32], position_ids=positions).logits
    torch.testing.assert_close(beside[:1], alone)
