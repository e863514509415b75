"""Model names to directories, directories to tokenizers."""

from penstock.models.context import context_note, model_context
from penstock.models.resolve import (
    KNOWN_MODELS,
    check_model,
    default_cache_directory,
    find_cached,
    resolve_model,
    set_cache_directory,
)
from penstock.models.tokenizer import load_tokenizer

__all__ = [
    "KNOWN_MODELS",
    "check_model",
    "context_note",
    "default_cache_directory",
    "find_cached",
    "load_tokenizer",
    "model_context",
    "resolve_model",
    "set_cache_directory",
]
