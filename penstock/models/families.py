"""The families whose forward pass Penstock has in its own, fused form: Llama and those built like it.

An engine needs of such a model its configuration and its weights. They are read here without the modules of
transformers, whose import takes longer than all else that a small engine does to start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.resolve import read_json

_NUMBERS = frozenset(
    {
        *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "head_dim"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    }
)
_MEANT = _NUMBERS | {
    *("model_type", "hidden_act", "rms_norm_eps", "rope_parameters"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings"),
}
"""What is asked of the configuration of a Llama."""
_IDLE = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "_model_name_or_path", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"),
    *("attention_dropout", "initializer_range", "pretraining_tp"),
}
"""What else its file may say, and nothing follows from it here."""
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not change with the length of the sequence."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Described(SimpleNamespace):
    """What a file says, as a configuration of transformers has it."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def get_text_config(self) -> Described:
        return self


def describe(model_dir: Path) -> Any:
    """The configuration of the model in a directory: that of transformers, or the same from its file, where that says
    all that is asked of it. Raises OSError, ValueError and KeyError, as transformers does."""
    try:
        fields = read_json(model_dir / "config.json")
    except ModelError:
        fields = {}
    if _says_all(fields):
        return Described(**fields)
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)


def _says_all(fields: Mapping[str, Any]) -> bool:
    """A Llama without anything unusual, as transformers 5 writes it."""
    rope = fields.get("rope_parameters")
    return (
        fields.get("model_type") == "llama"
        and _MEANT <= fields.keys() <= _MEANT | _IDLE
        and all(type(fields[name]) is int for name in _NUMBERS)
        and isinstance(rope, dict)
        and rope.keys() == {"rope_type", "rope_theta"}
        and rope["rope_type"] == "default"
    )


def is_like_llama(config: Any) -> bool:
    """Of a transformers configuration: RMSNorm, rotary positions, full attention, gated SiLU."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    return (
        config.model_type in _FAMILIES
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _ROPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and set(kinds) == {"full_attention"}
        and window is None
    )


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def read_weights(model_dir: Path, config: Any) -> dict[str, Tensor] | None:
    """The weights of a model like Llama by name; None when the files hold them in another way than usual.

    Raises ModelError, OSError and SafetensorError for files that cannot be read.
    """
    from safetensors import safe_open

    files = _safetensors(model_dir)
    unusual = ("quantization_config", "transformers_weights")
    if not files or any(getattr(config, name, None) is not None for name in unusual):
        return None
    wanted = parameter_shapes(config)
    found: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = wanted.keys() | {HEAD}
            found.update({name: file.get_tensor(name) for name in file.keys() if name in names})  # noqa: SIM118
    if HEAD not in wanted and EMBEDDING in found and is_tied(config, found):
        found.pop(HEAD, None)
    usual = {name: tuple(tensor.shape) for name, tensor in found.items()} == wanted
    return found if usual else None


def is_tied(config: Any, state: Mapping[str, Tensor]) -> bool:
    """Whether the output embedding is the input's; one of its own counts more than what the configuration says."""
    head, embedding = state.get(HEAD), state[EMBEDDING]
    return bool(config.tie_word_embeddings) and (head is None or torch.equal(head.float(), embedding.float()))


def parameter_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Of a model like Llama: its weights and their shapes."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, head_dim(config)
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    # The other families have none, whatever their configuration says.
    out_bias = config.model_type in ("llama", "qwen3") and config.attention_bias
    qkv_bias = config.model_type == "qwen2" or out_bias
    mlp_bias = config.model_type == "llama" and config.mlp_bias
    linear = {
        "self_attn.q_proj": (queries, hidden, qkv_bias),
        "self_attn.k_proj": (keys, hidden, qkv_bias),
        "self_attn.v_proj": (keys, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, queries, out_bias),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.model_type == "qwen3":
        norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        for name, (out, into, bias) in linear.items():
            shapes[f"{at}{name}.weight"] = (out, into)
            if bias:
                shapes[f"{at}{name}.bias"] = (out,)
        shapes |= {f"{at}{name}.weight": (width,) for name, width in norms.items()}
    return shapes


def rotary_frequencies(config: Any) -> tuple[Tensor, float]:
    """How fast each pair of a head's dimensions turns with the position, and what cos and sin are multiplied with."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        size = head_dim(config)
        turns = config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        return 1.0 / turns, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config)
    return frequencies, float(factor)


def _safetensors(model_dir: Path) -> list[Path]:
    index, single = model_dir / "model.safetensors.index.json", model_dir / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ModelError(f"{index} has no weight_map")
    return [model_dir / name for name in sorted(set(places.values()))]
