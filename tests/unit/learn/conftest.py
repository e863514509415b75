"""Tiny random models and groups of rollouts to train them on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock.models.bfloat16 import keep_onednn_alive
from penstock.rollout import FinishReason, Group, Prompt, RolloutState, Status, Tokens, Verdict, linear, pack_ids

# oneDNN asks once what it may use, at the first operation of the process that reaches it, whatever its dtype.
keep_onednn_alive()

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large enough that logits differ visibly; with the default every distribution is nearly uniform.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_group(
    group_id: str = "g",
    *,
    scores: list[float] | None = None,
    prompt: list[int] | None = None,
    answers: list[list[int]] | None = None,
    model_step: int = 0,
    logprob: float = -2.0,
) -> Group:
    answers = [[5, 6, 7], [8, 9]] if answers is None else answers
    scores = [float(i) for i in range(len(answers))] if scores is None else scores
    shared = Prompt(ids=pack_ids([3, 4, 5, 6] if prompt is None else prompt))
    return [
        RolloutState(
            prompt=shared,
            group_id=group_id,
            rollout_id=f"{group_id}/{index}",
            segments=linear(Tokens().append(ids, [logprob] * len(ids), model_step=model_step)),
            finish_reason=FinishReason.STOP,
            reward=Verdict(score),
            status=Status.COMPLETED,
        )
        for index, (ids, score) in enumerate(zip(answers, scores, strict=True))
    ]


def make_random_groups(seed: int, *, num_groups: int, k: int = 4, longest: int = 9) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [
        make_group(
            f"g{index}",
            prompt=rng.integers(3, VOCAB, rng.integers(1, 12)).tolist(),
            answers=[rng.integers(3, VOCAB, rng.integers(1, longest + 1)).tolist() for _ in range(k)],
            scores=rng.normal(size=k).tolist(),
        )
        for index in range(num_groups)
    ]


def make_model(kind: str, *, tied: bool = True) -> Any:
    torch.manual_seed(11)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=tied)).eval()


@pytest.fixture(scope="session")
def group_of() -> Callable[..., Group]:
    return make_group


@pytest.fixture(scope="session")
def random_groups() -> Callable[..., list[Group]]:
    return make_random_groups


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    return make_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model("llama").save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
