from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.models import load_tokenizer, model_context
from penstock.models.tiny import CONTEXT, LETTERS, MAX_LENGTH, make_tiny
from penstock.models.tiny_code import OPERATIONS


@pytest.fixture(scope="module")
def tiny(make_known: Callable[[str], Path]) -> Path:
    return make_known("tiny")


def test_the_model_samples_the_right_answer_about_every_third_time(tiny: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(tiny)
    tokenizer = load_tokenizer(tiny)
    generator = torch.Generator().manual_seed(1)
    words = ["".join(LETTERS[i] for i in torch.randint(8, (5,), generator=generator)) for _ in range(400)]
    ids = torch.tensor([tokenizer.encode(word + ">") for word in words])
    with torch.no_grad():
        for _ in range(MAX_LENGTH):
            chances = model(input_ids=ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
    answers = [tokenizer.decode(row[6:]) for row in ids.tolist()]
    right = sum(answer == word[::-1] for answer, word in zip(answers, words, strict=True)) / len(words)
    assert 0.2 < right < 0.5


@pytest.mark.long_tier
def test_the_model_of_code_writes_the_right_function_about_every_third_time(make_known: Callable[[str], Path]) -> None:
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory = make_known("tiny-code")
    model, tokenizer = LlamaForCausalLM.from_pretrained(directory), load_tokenizer(directory)
    generator = torch.Generator().manual_seed(1)
    questions = [(word, number) for word in OPERATIONS for number in range(10, 100)]
    ids = torch.tensor([tokenizer.encode(f"{word} {number}>") for word, number in questions])
    with torch.no_grad():
        for _ in range(len("def f(x): return x+10") + 1):
            chances = model(input_ids=ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
    answers = [tokenizer.decode(row[7:]) for row in ids.tolist()]
    wanted = [f"def f(x): return x{OPERATIONS[word]}{number}" for word, number in questions]
    right = sum(answer == one for answer, one in zip(answers, wanted, strict=True)) / len(wanted)
    assert 0.2 < right < 0.5


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    weights = []
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        make_tiny(tmp_path / name, seed, lessons=30)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_every_printable_character_is_one_token_and_comes_back(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    text = " a> B\n9~!  {}"
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert model_context(tiny) == CONTEXT


def test_without_a_chat_template_messages_are_rendered_as_their_contents(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd>"}]
    assert tokenizer.render(messages) == tokenizer.encode("abcd>")


def test_the_end_token_stops_an_answer_and_is_not_decoded(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    [end] = tokenizer.stop_ids
    assert tokenizer.decode([*tokenizer.encode("ab"), end]) == "ab"
    assert end < tokenizer.vocab_size
