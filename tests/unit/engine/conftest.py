"""Tiny random models of each kind of forward, written once per session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import Subject
from engine_models import make_subject, write_model, write_tokenizer
from transformers import AutoModelForCausalLM

KINDS = ("llama", "llama-scaled", "qwen2", "qwen3", "gpt2")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for seed, kind in enumerate(KINDS):
        write_model(kind, root / kind, seed=seed)
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def references(model_dirs: dict[str, Path]) -> dict[str, Any]:
    return {kind: AutoModelForCausalLM.from_pretrained(path).eval() for kind, path in model_dirs.items()}


@pytest.fixture(scope="session")
def subjects(model_dirs: dict[str, Path], references: dict[str, Any]) -> dict[str, Subject]:
    return {kind: make_subject(model_dirs[kind], references[kind]) for kind in KINDS}


@pytest.fixture(scope="session")
def served_dir(model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "llama"
    shutil.copytree(model_dirs["llama"], directory)
    write_tokenizer(directory)
    return directory
