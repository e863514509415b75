"""Models that compute otherwise in long sequences: other rotary frequencies, or layers that do not look all the way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from engine_contract import CharacterTokenizer, ask, ids_of, logprobs_of
from transformers import GPTNeoConfig, GPTNeoForCausalLM, Phi3Config, Phi3ForCausalLM

from penstock.engine import EmbeddedEngineConfig
from penstock.errors import DataFailure, ModelError


@pytest.fixture(scope="module")
def long_phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 positions, stretched to 256 by a second set of frequencies."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("phi")
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    config = Phi3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=48,
        rope_parameters=rope | {"original_max_position_embeddings": 48},
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Phi3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_up_to_the_first_context_have_the_logprobs_of_each_row_alone(
    long_phi: Path, deterministic: bool
) -> None:
    engine = EmbeddedEngineConfig().build(str(long_phi), CharacterTokenizer(), deterministic=deterministic, threads=1)
    # In deterministic mode the first prompt is padded to 64 positions.
    prompts = [[(7 * j) % 96 for j in range(36)], [3, 4, 5]]

    async def run() -> None:
        asked = [ask(f"{i}", prompt, seed=i, max_tokens=12) for i, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*(engine.generate(request) for request in asked))
        reference = Phi3ForCausalLM.from_pretrained(long_phi).eval()
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = torch.tensor([*prompt, *ids_of(answer)])
            with torch.no_grad():
                plain = reference(input_ids=whole[None]).logits[0].log_softmax(-1)
            expected = plain[:-1].gather(1, whole[1:, None])[len(prompt) - 1 :, 0]
            torch.testing.assert_close(torch.tensor(logprobs_of(answer)), expected, atol=1e-4, rtol=0)
        with pytest.raises(DataFailure, match="the context is 48"):
            await engine.generate(ask("long", prompts[0], max_tokens=13))
        await engine.close()

    asyncio.run(run())


def test_a_longer_context_than_the_first_is_refused(long_phi: Path) -> None:
    with pytest.raises(ModelError, match=r"max_context is 64; the model in .* has 48"):
        EmbeddedEngineConfig(max_context=64).build(str(long_phi), CharacterTokenizer())


def test_local_attention_ends_the_context_where_its_window_does(tmp_path: Path) -> None:
    layers = {"attention_types": [[["global", "local"], 1]], "window_size": 32, "max_position_embeddings": 256}
    shape = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    GPTNeoForCausalLM(GPTNeoConfig(**shape, **layers, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path)
    asyncio.run(EmbeddedEngineConfig(max_context=32).build(str(tmp_path), CharacterTokenizer()).close())
    with pytest.raises(ModelError, match=r"max_context is 33; the model in .* has 32"):
        EmbeddedEngineConfig(max_context=33).build(str(tmp_path), CharacterTokenizer())
