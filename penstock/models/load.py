"""A causal language model of transformers, as it is on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from penstock.errors import ModelError
from penstock.models.context import fix_frequencies


def load_causal_lm(model_dir: Path) -> Any:
    """In float32, from a Hugging Face directory, without remote code. Raises ModelError, also when it lacks weights."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # Its bars would be drawn across the run's own display.
    logging.disable_progress_bar()
    if not (model_dir / "config.json").is_file():
        raise ModelError(f"{model_dir} is not a model directory: it has no config.json")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the model in {model_dir} cannot be loaded as a causal language model: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"the model in {model_dir} lacks {len(missing)} weights, among them {missing[0]}; they would be random"
        )
    fix_frequencies(model)
    return model
