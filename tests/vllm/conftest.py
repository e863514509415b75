"""A real vLLM from .venv-vllm behind the trainer's own environment, with a tiny random model and with SmolLM2."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import CharacterTokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from penstock.engine import VllmEngineConfig
from penstock.engine.process import ProcessEngine

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """One event loop for all: starting vLLM takes long, so tests share an engine, and an engine has one loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over `CharacterTokenizer`'s 96 tokens; the last stands for end-of-text."""
    logging.disable_progress_bar()
    directory = tmp_path_factory.mktemp("model") / "llama"
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM has on a CPU
        max_position_embeddings=2048,
        initializer_range=0.25,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at 1, which would hide a mistake
                parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(directory)
    # Inside the model's vocabulary: vLLM masks it before min_tokens, wherever it is.
    vocabulary = {chr(32 + i): i for i in range(95)} | {"<end>": 95}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def make(run: Run, model_dir: Path) -> Iterator[Callable[..., ProcessEngine]]:
    """An engine with the tiny model, which starts with its first call."""
    engines: list[ProcessEngine] = []

    def made(**fields: Any) -> ProcessEngine:
        config = VllmEngineConfig(
            **{"dtype": "float32", "max_running": 6, "max_context": 2048, "kv_cache_gb": 0.1, **fields}
        )
        engine = config.build(str(model_dir), CharacterTokenizer(), threads=1, most_threads=2)
        assert isinstance(engine, ProcessEngine)
        engines.append(engine)
        return engine

    yield made
    for engine in engines:
        run(engine.close())


@pytest.fixture(scope="session")
def start(run: Run, make: Callable[..., ProcessEngine]) -> Callable[..., ProcessEngine]:
    """The same, started; returns when it serves."""

    def started(**fields: Any) -> ProcessEngine:
        engine = make(**fields)
        run(engine.check_health())
        return engine

    return started
