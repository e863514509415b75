from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.agent_loop.parsers import ToolCall, hermes
from penstock.agent_loop.rendering import ids_after, template_problems
from penstock.models import load_tokenizer, model_context
from penstock.models.tiny_chat import _SPEECH, CONTEXT, SUM, _game, _repeating, _sums, make_tiny_chat
from penstock.ports import Tokenizer

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer is that of the taught one."""
    directory = tmp_path_factory.mktemp("tiny-chat")
    make_tiny_chat(directory, lessons=2)
    return directory


@pytest.fixture(scope="module")
def tokenizer(untaught: Path) -> Tokenizer:
    return load_tokenizer(untaught)


def asked(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def test_lessons_are_written_as_the_tokenizer_writes_them(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for speeches in [_sums(rng, 2, True), _sums(rng, 1, False), _game(rng, True), _repeating(rng)] * 5:
        text = "".join(text for text, _ in speeches)
        assert len(tokenizer.encode(text)) == len(_SPEECH.findall(text))


def test_a_lesson_is_a_conversation_as_the_template_writes_it(tokenizer: Tokenizer) -> None:
    text = "".join(text for text, _ in _sums(random.Random(1), 1, False))
    prompt = tokenizer.render_text(asked("17+72=?"), [CALCULATOR])
    assert text.startswith(prompt)
    answer = text[len(prompt) :].partition("<|end|>")[0]
    assert hermes(answer).calls == (ToolCall("calculator", {"expression": "17+72"}),)
    call = {"id": "call00000", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "1"}}}
    history = [*asked("17+72=?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = text[len(prompt) + len(answer) :].partition("<|tool|>")[2].partition("<|end|>")[0]
    new = [{"role": "tool", "content": result}]
    ids = ids_after(tokenizer, history, new, [CALCULATOR], last_id=min(tokenizer.stop_ids))
    assert ids == tokenizer.encode(f"\n<|tool|>{result}<|end|>\n<|assistant|>")


def test_conversations_only_grow_under_its_template(tokenizer: Tokenizer) -> None:
    assert template_problems(tokenizer, tools=[CALCULATOR]) == []


def test_its_context_holds_conversations(untaught: Path) -> None:
    assert model_context(untaught) == CONTEXT >= 1024


def test_text_that_is_tokenised_again_has_other_ids_than_the_model_may_write(tokenizer: Tokenizer) -> None:
    letter_by_letter = [token for letter in "higher" for token in tokenizer.encode(letter)]
    assert tokenizer.decode(letter_by_letter) == "higher"
    assert tokenizer.encode("higher") != letter_by_letter


@pytest.mark.long_tier
def test_it_calls_rightly_about_every_third_time_and_repeats_what_it_is_told(make_known: Callable[[str], Path]) -> None:
    directory = make_known("tiny-chat")
    tokenizer = load_tokenizer(directory)
    rng = random.Random(1)
    sums = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(300)]
    prompts = [tokenizer.render(asked(SUM.format(a=a, b=b)), [CALCULATOR]) for a, b in sums]
    answers = _sampled(directory, prompts, 18)
    calls = [hermes(tokenizer.decode(answer)).calls for answer in answers]
    right = [
        call == (ToolCall("calculator", {"expression": f"{a}+{b}"}),) for call, (a, b) in zip(calls, sums, strict=True)
    ]
    assert 0.2 < sum(right) / len(sums) < 0.5
    told = [
        (prompt + answer + tokenizer.encode(f"\n<|tool|>{a + 100}<|end|>\n<|assistant|>"), str(a + 100))
        for prompt, answer, (a, _), good in zip(prompts, answers, sums, right, strict=True)
        if good
    ]
    said = [tokenizer.decode(answer) for answer in _sampled(directory, [ids for ids, _ in told], 4)]
    repeated = [answer == result for answer, (_, result) in zip(said, told, strict=True)]
    assert sum(repeated) > 0.8 * len(told)


def _sampled(directory: Path, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Answers up to their end, or as many tokens."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(directory)
    generator = torch.Generator().manual_seed(1)
    answers: dict[int, list[int]] = {}
    for size in sorted({len(prompt) for prompt in prompts}):
        places = [place for place, prompt in enumerate(prompts) if len(prompt) == size]
        ids = torch.tensor([prompts[place] for place in places])
        with torch.no_grad():
            for _ in range(length):
                chances = model(input_ids=ids).logits[:, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
        for place, row in zip(places, ids[:, size:].tolist(), strict=True):
            answers[place] = row[: row.index(1) + 1] if 1 in row else row
    return [answers[place] for place in range(len(prompts))]
