"""How many tokens a model holds, prompt and answer together.

Some models turn positions otherwise in long sequences: `longrope` (Phi-3, Phi-4) has one set of frequencies up to the
context it was first trained with and another beyond, `dynamic` stretches them with the length. transformers chooses by
the largest position in a batch, so one long row would change the logprobs of all its neighbours, and of its own first
tokens. Here such a model has its first context, and the frequencies that belong to it, always.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.models.resolve import read_json


def model_context(directory: Path) -> int:
    """The longest sequence the model was made for, or the longest before its positions turn otherwise."""
    fields = read_json(directory / "config.json")
    declared = _declared(fields, directory)
    return min(declared, rope_limit(fields) or declared)


def context_note(directory: Path) -> str | None:
    """What to tell people when the context is shorter than the model's configuration says."""
    fields = read_json(directory / "config.json")
    declared, limit = _declared(fields, directory), rope_limit(fields)
    if limit is None or limit >= declared:
        return None
    return (
        f"the context is {limit} tokens, not {declared}: beyond {limit} this model turns positions otherwise, "
        "which would change the tokens that are already written"
    )


def rope_limit(fields: Mapping[str, Any]) -> int | None:
    """Of a configuration: up to which length its rotary frequencies are the same; None where they always are."""
    ropes = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    # One for all layers, or one for each kind of layer.
    each = [rope for rope in ropes.values() if isinstance(rope, Mapping)] or [ropes]
    limits = []
    for rope in each:
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if "long_factor" in rope or "dynamic" in kind:
            lengths = [rope.get("original_max_position_embeddings"), fields.get("original_max_position_embeddings")]
            limits += [length for length in (*lengths, fields.get("max_position_embeddings")) if length][:1]
    return min(limits, default=None)


def attention_window(config: Any) -> int | None:
    """Of a transformers configuration: how far back the layers look that do not look at everything; None where its
    fields name no such layer."""
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        sizes.append(config.window_size)
    return min((size for size in sizes if size), default=None)


def fix_frequencies(model: Any) -> None:
    """Let a model that was just loaded keep the rotary frequencies it has, whatever it is given."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {layer: _fixed(own) for layer, own in kind.items()}
        elif isinstance(kind, str):
            module.rope_type = _fixed(kind)


def _fixed(kind: str) -> str:
    # What transformers asks before it computes frequencies anew.
    return "default" if kind == "longrope" or "dynamic" in kind else kind


def _declared(fields: Mapping[str, Any], directory: Path) -> int:
    context = fields.get("max_position_embeddings", fields.get("n_positions"))
    if not isinstance(context, int):
        raise ModelError(f"{directory / 'config.json'} has no max_position_embeddings; the context length is unknown")
    return context
