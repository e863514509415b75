"""The re-feed check on vLLM: what sessions record is what the model saw, in the languages of two families."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_families import tokenizer_of
from random_conversations import converse
from refeed_models import save_random_model, with_another_token
from session_clients import Noted, Talk, user
from transformers import AutoModelForCausalLM

from penstock.engine import VllmEngineConfig
from penstock.models.tokenizer import HFTokenizer
from penstock.rollout import Prompt, RolloutState, SampleParams, pack_ids, unpack_ids
from penstock.testing import RefeedMismatch, recorded_answers, refeed

TEMPLATES = ("qwen2.5", "llama3")
NUM_CONVERSATIONS = 10
"""With each template."""
TOLERANCE = 1e-3
"""The stated mismatch of vLLM in float32."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over the tokens of both families, in which every token changes what comes after it."""
    directory = tmp_path_factory.mktemp("spoken")
    save_random_model(directory, *TEMPLATES, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    tokenizer_of(TEMPLATES[0]).inner.save_pretrained(directory)  # vLLM wants one; ids go in and out
    return directory


@pytest.fixture(scope="module")
def engine(run: Callable[..., Any], model_dir: Path) -> Iterator[Any]:
    config = VllmEngineConfig(dtype="float32", max_running=NUM_CONVERSATIONS, max_context=2048, kv_cache_gb=0.1)
    # Ends of turns come with the requests: an id that ends one family's turn is a word of the other.
    without_ends = HFTokenizer(tokenizer_of(TEMPLATES[0]).inner, frozenset(), Path())
    made = config.build(str(model_dir), without_ends, threads=1)
    yield made
    run(made.close())


@pytest.fixture(scope="module", params=TEMPLATES)
def rollouts(request: pytest.FixtureRequest, run: Callable[..., Any], engine: Any) -> list[RolloutState]:
    """Conversations as agents have them, all at once, sampled; what they left on record."""
    family: str = request.param
    tokenizer = tokenizer_of(family)
    ends = tuple(sorted(tokenizer.stop_ids))
    hello = Prompt(messages=(), ids=pack_ids(tokenizer.render([user("hello")])))

    async def had(number: int) -> Talk:
        name = f"{family}:{number}"
        rollout = RolloutState(prompt=hello, task_name="t", group_id=name, rollout_id=f"{name}:0")
        params = SampleParams(max_tokens=12, stop_token_ids=ends)
        talk, _ = await converse(family, number, 3, engine=Noted(engine), params=params, rollout=rollout)
        talk.require_exact()
        return talk

    async def all_at_once() -> list[Talk]:
        return await asyncio.gather(*map(had, range(NUM_CONVERSATIONS)))

    return [talk.rollout for talk in run(all_at_once())]


def test_sampled_answers_have_the_logprobs_that_were_recorded(
    run: Callable[..., Any], engine: Any, rollouts: list[RolloutState]
) -> None:
    refed = run(refeed(engine, rollouts, greedy=False, tolerance=TOLERANCE))
    assert refed.answers >= 4 * NUM_CONVERSATIONS and refed.tokens > 100
    assert refed.largest_mismatch <= TOLERANCE


def test_what_is_recorded_are_the_logprobs_of_another_implementation_too(
    rollouts: list[RolloutState], model_dir: Path
) -> None:
    """So that a check of the engine against its own record cannot be all there is."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    answers = [answer for rollout in rollouts[:3] for answer in recorded_answers(rollout)]
    for answer in answers:
        ids = torch.tensor(unpack_ids(answer.prompt_ids + answer.ids).tolist())
        with torch.inference_mode():
            table = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
        expected = table[torch.arange(len(ids) - 1), ids[1:]].numpy()[-len(answer.logprobs) :]
        np.testing.assert_allclose(answer.logprobs, expected, atol=TOLERANCE)
    assert np.std(np.concatenate([answer.logprobs for answer in answers])) > 0.5


def test_one_changed_token_is_found_in_every_conversation(
    run: Callable[..., Any], engine: Any, rollouts: list[RolloutState]
) -> None:
    """In an answer, and in what was said to the model before the next one."""

    async def check() -> None:
        said = 0
        for rollout in rollouts:
            first, *rest = (turn for turn in rollout.turns if turn.segment == 0)
            places = [0] + ([first.num_tokens] if any(turn.kind == "generate" for turn in rest) else [])
            said += len(places) - 1
            for place in places:
                with pytest.raises(RefeedMismatch, match=r"token \d+ of"):
                    changed = with_another_token(rollout, 0, place)
                    await refeed(engine, [changed], greedy=False, tolerance=TOLERANCE)
        assert said >= NUM_CONVERSATIONS // 2

    run(check())
