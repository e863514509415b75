"""The contract of all engines, on vLLM."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_contract import (
    CONTRACT,
    LONG,
    PROMPTS,
    AsNew,
    CharacterTokenizer,
    Subject,
    Tensors,
    ask,
    closing_fails_what_is_pending_and_all_that_comes_later,
    ids_of,
)
from transformers import AutoModelForCausalLM

from penstock.engine.process import ProcessEngine
from penstock.errors import DataFailure
from penstock.rollout import FinishReason


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir).eval()


@pytest.fixture(scope="module")
def engine(start: Callable[..., ProcessEngine]) -> ProcessEngine:
    return start()


def subject_of(model: Any, make: Callable[[], Any]) -> Subject:
    def reference(ids: Any, temperature: float) -> np.ndarray:
        with torch.inference_mode():
            logits = model(torch.tensor([list(ids)])).logits[0].float()
        return torch.log_softmax(logits / temperature, -1).numpy()

    generator = torch.Generator().manual_seed(99)
    other = {
        name: weight + 0.2 * torch.randn(weight.shape, generator=generator)
        for name, weight in model.state_dict().items()
    }
    return Subject(make=make, other_weights=Tensors(other), reference=reference, numbered_randomness=False)


@pytest.mark.parametrize(
    "check",
    [check for check in CONTRACT if check is not closing_fails_what_is_pending_and_all_that_comes_later],
    ids=lambda check: check.__name__,
)
def test_the_contract(
    check: Callable[[Subject], Awaitable[None]], run: Callable[..., Any], engine: ProcessEngine, model: Any
) -> None:
    reused = AsNew(engine, Tensors(model.state_dict()))
    run(check(subject_of(model, reused.again)))  # type: ignore[arg-type]


def test_a_stop_string_that_begins_before_the_continuation_is_found(
    run: Callable[..., Any], engine: ProcessEngine
) -> None:
    async def check() -> None:
        whole = ids_of(await engine.generate(ask("whole", temperature=0.0, max_tokens=30)))
        text = CharacterTokenizer().decode(whole)
        # The first place whose three characters did not occur before.
        cut = next(i for i in range(6, 24) if text.index(text[i - 1 : i + 2]) == i - 1)
        stop = text[cut - 1 : cut + 2]
        rest = await engine.generate(ask("rest", temperature=0.0, max_tokens=30, given=whole[:cut], stop=(stop,)))
        assert rest.finish_reason is FinishReason.STOP
        assert ids_of(rest) == whole[cut : cut + 2]
        assert rest.steps == ((0, 2),)

    run(check())


def test_a_continued_sample_does_not_replay_the_numbers_it_used(run: Callable[..., Any], engine: ProcessEngine) -> None:
    async def check() -> None:
        given = ids_of(await engine.generate(ask("given", seed=5, temperature=2.0, max_tokens=20)))
        rest = await engine.generate(ask("rest", seed=5, temperature=2.0, given=given, max_tokens=40))
        again = await engine.generate(ask("again", seed=5, temperature=2.0, given=given, max_tokens=40))
        assert ids_of(rest) == ids_of(again)
        # The same tokens before, and the numbers from the first one on.
        replayed = await engine.generate(ask("replayed", [*PROMPTS[0], *given], seed=5, temperature=2.0, max_tokens=20))
        assert ids_of(rest) != ids_of(replayed)

    run(check())


def test_a_temperature_that_vllm_refuses_is_a_data_failure(run: Callable[..., Any], engine: ProcessEngine) -> None:
    with pytest.raises(DataFailure, match=r"request hot: vLLM refused it: temperature must be in \[0, 2\]"):
        run(engine.generate(ask("hot", temperature=2.5)))


def test_more_prompt_tokens_than_one_step_computes_do_not_end_the_engine(
    run: Callable[..., Any], engine: ProcessEngine
) -> None:
    async def check() -> None:
        for length in (LONG, 2000):
            long = ask("long", [7, 9] * (length // 2), seed=1, max_tokens=4)
            short = ask("short", [3] * 700, seed=2, max_tokens=4)
            completions = [engine.generate(request) for request in (short, long, short)]
            for completion in completions:
                assert len(ids_of(await completion)) == 4

    run(check())


def test_closing_fails_what_is_pending_and_all_that_comes_later(
    run: Callable[..., Any], engine: ProcessEngine, model: Any
) -> None:
    """The last of this file: it closes the engine that the others share."""
    run(closing_fails_what_is_pending_and_all_that_comes_later(subject_of(model, lambda: engine)))
