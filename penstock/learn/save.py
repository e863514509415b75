"""Write a model directory that is whole or not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from penstock.errors import StorageError

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model",
)  # fmt: skip


def save_hf(model: Any, tokenizer_dir: Path, directory: Path) -> None:
    """The model's weights and configuration with the tokenizer of `tokenizer_dir`; replaces a directory of that name.

    Everything is written and flushed under another name first. Raises StorageError, the old directory still there;
    a crash between the two renames leaves both complete under their hidden names.
    """
    directory = directory.absolute()
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    replaced = directory.with_name(f".{directory.name}.replaced")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        for left_over in (unfinished, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
        model.save_pretrained(unfinished)
        for pattern in TOKENIZER_FILES:
            for file in sorted(tokenizer_dir.glob(pattern)):
                if file.is_file():
                    shutil.copy(file, unfinished / file.name)
        for path in [*unfinished.rglob("*"), unfinished]:
            _flush(path)
        _swap(unfinished, directory, replaced)
        _flush(directory.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{directory} could not be written: {error}") from error


def _swap(new: Path, name: Path, old: Path) -> None:
    if name.exists():
        name.rename(old)
    try:
        new.rename(name)
    except OSError:
        if old.exists():
            old.rename(name)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
