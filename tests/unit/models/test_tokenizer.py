from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.data.prompts import RendersMany
from penstock.errors import ModelError
from penstock.models import load_tokenizer

TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t['function']['name'] }}{% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m['content'] }}|{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def save(directory: Path, template: str | None, end: str | None = "<e>", **generation: object) -> Path:
    vocabulary = {token: i for i, token in enumerate(["<u>", "<e>", "<turn>", *"abcf|>[]"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<u>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<u>", eos_token=end)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_a_chat_template_renders_messages_tools_and_the_place_of_the_answer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, TEMPLATE))
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert tokenizer.decode(tokenizer.render(messages)) == "ab|c|>"
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    assert tokenizer.decode(tokenizer.render(messages, [tool])) == "[f]ab|c|>"


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_several_conversations_are_rendered_as_each_alone(tmp_path: Path, template: str | None) -> None:
    tokenizer = load_tokenizer(save(tmp_path, template))
    assert isinstance(tokenizer, RendersMany)
    conversations = [[{"role": "user", "content": text}] * n for n, text in enumerate(["ab", "c", "abcabc", "zz"], 1)]
    assert tokenizer.render_many(conversations) == [tokenizer.render(messages) for messages in conversations]


def test_the_end_of_turn_of_the_generation_config_stops_an_answer_too(tmp_path: Path) -> None:
    assert load_tokenizer(save(tmp_path, TEMPLATE, eos_token_id=[2, 1])).stop_ids == {1, 2}


def test_a_tokenizer_that_nothing_stops_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="answers would never end"):
        load_tokenizer(save(tmp_path, None, end=None))


def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
