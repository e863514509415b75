"""The re-feed check, over real models: what sessions record is what the model saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES, tokenizer_of
from random_conversations import converse
from refeed_models import save_random_model, with_another_token
from session_clients import Noted, Talk

from penstock.engine import EmbeddedEngineConfig
from penstock.rollout import RolloutState, SampleParams, Segment, Tokens
from penstock.testing import RefeedMismatch, recorded_answers, refeed

GREEDY = SampleParams(temperature=0.0, max_tokens=24)
SAMPLED = SampleParams(temperature=1.0, max_tokens=24)
TOLERANCE = 1e-4
"""The stated mismatch of the embedded engine in float32."""


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model over a family's tokens that ends its turns now and then."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_random_model(made[family], family)
        return made[family]

    return make


def conversed(model_dir: Path, family: str, seeds: range, params: SampleParams, check: Any) -> list[Talk]:
    """Sessions with a real engine, and a check of them while it is still there."""

    async def main() -> list[Talk]:
        engine = EmbeddedEngineConfig().build(
            str(model_dir), tokenizer_of(family), deterministic=params.temperature == 0, threads=1
        )
        try:
            talks = [(await converse(family, seed, 4, engine=Noted(engine), params=params))[0] for seed in seeds]
            await check(engine, [talk.rollout for talk in talks])
        finally:
            await engine.close()
        return talks

    return asyncio.run(main())


@pytest.mark.sized
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_recorded_greedily_come_back_identical_when_asked_alone(
    family: str, model_of: Callable[[str], Path], size: Callable[[int, int], int]
) -> None:
    async def check(engine: Any, rollouts: list[RolloutState]) -> None:
        refed = await refeed(engine, rollouts, greedy=True)
        assert refed.answers >= 4 * len(rollouts)

    for talk in conversed(model_of(family), family, range(size(2, 63)), GREEDY, check):
        talk.require_exact()


@pytest.mark.parametrize("family", ["qwen2.5", "llama3"])
def test_sampled_answers_have_the_logprobs_that_were_recorded(family: str, model_of: Callable[[str], Path]) -> None:
    async def check(engine: Any, rollouts: list[RolloutState]) -> None:
        refed = await refeed(engine, rollouts, greedy=False, tolerance=TOLERANCE)
        assert refed.tokens > 50 and refed.largest_mismatch <= TOLERANCE

    conversed(model_of(family), family, range(2), SAMPLED, check)


@pytest.mark.parametrize("greedy", [True, False])
def test_one_changed_token_is_found(greedy: bool, model_of: Callable[[str], Path]) -> None:
    """In an answer and in what was said to the model, also where a newline at a seam is lost."""

    async def check(engine: Any, rollouts: list[RolloutState]) -> None:
        (rollout,) = rollouts
        said = [turn for turn in rollout.turns if turn.segment == 0][:3]
        places = [0, said[0].num_tokens] if len(said) > 1 else [0]
        for place in places:
            with pytest.raises(RefeedMismatch, match=r"token \d+ of"):
                await refeed(engine, [with_another_token(rollout, 0, place)], greedy=greedy, tolerance=TOLERANCE)

    conversed(model_of("qwen2.5"), "qwen2.5", range(3, 4), GREEDY if greedy else SAMPLED, check)


def test_a_record_without_answers_or_of_other_weights_is_refused(model_of: Callable[[str], Path]) -> None:
    async def check(engine: Any, rollouts: list[RolloutState]) -> None:
        with pytest.raises(ValueError, match="no answer on record"):
            await refeed(engine, [], greedy=True)
        (rollout,) = rollouts
        segment = rollout.segments[0]
        of_later = Tokens(segment.tokens.ids, segment.tokens.logprobs, segment.tokens.mask, ((7, len(segment.tokens)),))
        rollout.segments = (Segment(of_later, segment.parent, segment.start), *rollout.segments[1:])
        assert next(recorded_answers(rollout)).steps == {7}
        with pytest.raises(ValueError, match=r"made by weights \[7\]; the engine serves 0"):
            await refeed(engine, [rollout], greedy=True)

    conversed(model_of("qwen2.5"), "qwen2.5", range(1), GREEDY, check)
