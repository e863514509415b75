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

from penstock.learn.batch import TrainBatch, prepare_batch
from penstock.models.bfloat16 import keep_onednn_alive
from penstock.rollout import (
    ROOT,
    FinishReason,
    Group,
    Prompt,
    RolloutState,
    Segment,
    Status,
    Tokens,
    Verdict,
    linear,
    pack_ids,
)

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


def make_random_trees(seed: int, *, num_groups: int, k: int = 3, tool_share: float = 0.3) -> list[Group]:
    """Rollouts of one to five segments, each from anywhere in an earlier one or in the prompt; some text of tools."""
    rng = np.random.default_rng(seed)
    groups = make_random_groups(seed, num_groups=num_groups, k=k)
    for rollout in (rollout for group in groups for rollout in group):
        for index in range(1, int(rng.integers(1, 6))):
            parent = int(rng.integers(ROOT, index))
            before = len(rollout.prompt_ids) if parent == ROOT else len(rollout.segments[parent].tokens)
            # A trained token has something before it.
            start = int(rng.integers(1 if parent == ROOT else 0, before + 1))
            ids = rng.integers(3, VOCAB, rng.integers(1, 8))
            tokens = Tokens()
            for token in ids:
                tool = rng.random() < tool_share
                tokens = tokens.append([token], None if tool else [-rng.random()], model_step=0, trained=not tool)
            rollout.segments = (*rollout.segments, Segment(tokens, parent, start))
    return groups


def make_branched() -> list[Group]:
    """A linear answer, and one of four segments: a first, one after its second token, one after all of it, and one
    that goes on from two tokens of the prompt."""
    [group] = [make_group(prompt=[3, 4, 5, 6], answers=[[20, 21, 22], [30, 31, 32, 33]])]
    more = [
        Segment(sampled([40, 41, 42]), 0, 2),
        Segment(sampled([50, 51, 52]), 0, 4),
        Segment(sampled([60, 61]), ROOT, 2),
    ]
    group[1].segments = (*group[1].segments, *more)
    return [group]


def sampled(ids: list[int]) -> Tokens:
    return Tokens().append(ids, [-2.0] * len(ids), model_step=0)


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
def random_trees() -> Callable[..., list[Group]]:
    return make_random_trees


@pytest.fixture(scope="session")
def branched() -> Callable[[], list[Group]]:
    return make_branched


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    return make_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model("llama").save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


@pytest.fixture
def batch(random_groups: Callable[..., list[Group]]) -> TrainBatch:
    """Four groups of the first step."""
    return prepare_batch(random_groups(7, num_groups=4), train_step=1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
