"""What a run was made from: the files of its model, so that a resume does not go on with another one.

Weights, tokenizer and configuration lie in a directory that somebody may change. Every checkpoint names them; a resume
compares before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import CheckpointError, StorageError
from penstock.learn.save import TOKENIZER_FILES
from penstock.trainer.files import Files
from penstock.trainer.manifest import HASH_THREADS

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
CONFIG_FILES = ("config.json", "generation_config.json")


class ModelOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """SHA-256 of each file of a model directory, by its name."""

    directory: str
    """Where they were; for people."""
    weights: dict[str, str]
    tokenizer: dict[str, str]
    config: dict[str, str]
    beside: dict[str, dict[str, str]] = {}
    """The weights of the other models that the run learns from, by what they are to it: its reference, its teachers."""


def model_origin(model_dir: Path, beside: Mapping[str, Path] | None = None) -> ModelOrigin:
    """Reads every file of the model, and the weights of those beside it. Raises StorageError."""
    origin = _origin_of(model_dir)
    others = {name: _origin_of(directory).weights for name, directory in (beside or {}).items()}
    return msgspec.structs.replace(origin, beside=others)


def _origin_of(model_dir: Path) -> ModelOrigin:
    kinds = {"weights": WEIGHT_FILES, "tokenizer": TOKENIZER_FILES, "config": CONFIG_FILES}
    try:
        files = [path for path in sorted(model_dir.iterdir()) if path.is_file()]
        named = [path for path in files if _is_any(path, *kinds.values())]
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            sums = {path: found.sha256 for path, found in zip(named, pool.map(Files().checksum, named), strict=True)}
    except OSError as error:
        raise StorageError(f"the model in {model_dir} cannot be read: {error}") from error
    by_kind: dict[str, Any] = {
        kind: {path.name: digest for path, digest in sums.items() if _is_any(path, patterns)}
        for kind, patterns in kinds.items()
    }
    return ModelOrigin(directory=str(model_dir.absolute()), **by_kind)


def require_same_model(state: Mapping[str, Any], step: int, now: ModelOrigin) -> None:
    """Whether a checkpoint with this `state` was made from the model that is there now.

    Raises CheckpointError with every file that differs. A checkpoint that an earlier version wrote names less, or
    nothing; what it names is compared.
    """
    saved = state.get("made_from", {"weights": state["weights"]} if "weights" in state else {})
    problems = [
        f"its {kind}: {difference}"
        for kind in ("weights", "tokenizer", "config")
        if kind in saved
        for difference in _differences(saved[kind], getattr(now, kind))
    ]
    problems += [
        f"{name}: {difference}"
        for name, weights in saved.get("beside", {}).items()
        if name in now.beside  # one that the configuration no longer names is a change of that
        for difference in _differences(weights, now.beside[name])
    ]
    if problems:
        was = f" (it was in {saved['directory']})" if saved.get("directory", now.directory) != now.directory else ""
        raise CheckpointError(
            [
                f"checkpoint {step} was made from another model than the one in {now.directory}{was}; "
                "give the run its own model back, or begin a new run with this one",
                *(f"  {problem}" for problem in problems),
            ]
        )


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {'is new' if name not in before else 'is gone' if name not in now else 'has another content'}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _is_any(path: Path, *patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path.name, pattern) for some in patterns for pattern in some)
