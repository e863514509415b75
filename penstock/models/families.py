"""The families whose forward pass Penstock has in its own, fused form: Llama and those built like it."""

from __future__ import annotations

from typing import Any

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not change with the length of the sequence."""


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
