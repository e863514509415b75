"""The `Tokenizer` port over transformers. Importing this module is cheap; `load_tokenizer` brings transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.models.resolve import read_json
from penstock.ports import Description, Tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory. Raises ModelError when it cannot be read or nothing ends an answer."""
    import transformers

    try:
        inner = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the tokenizer in {directory} cannot be read: {error}") from error
    stop_ids = _stop_ids(inner, directory)
    if not stop_ids:
        raise ModelError(f"the tokenizer in {directory} has no end-of-text token; answers would never end")
    return HFTokenizer(inner, stop_ids, directory)


class HFTokenizer:
    """Chat models render through their template; a model without one reads the contents of the messages, joined."""

    def __init__(self, inner: Any, stop_ids: frozenset[int], directory: Path) -> None:
        self.inner = inner
        """The tokenizer of transformers, for code that was written for it."""
        self._stop_ids = stop_ids
        self._directory = directory

    def description(self) -> Description:
        """How it is built in another process, which finds the directory under the same name."""
        return Description(
            name="tokenizer", port="tokenizer", build=load_tokenizer, arguments={"directory": self._directory}
        )

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    @property
    def vocab_size(self) -> int:
        return len(self.inner)

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        # No clean-up of spaces: the judger sees what the model wrote.
        text = self.inner.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.encode(self.render_text(messages, tools))

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = True,
    ) -> str:
        if self.inner.chat_template is None:
            return "".join(str(message["content"]) for message in messages)
        text = self.inner.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
        return str(text)

    def render_many(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
        """As `render` for each, on all cores. Raises when the template refuses one of them."""
        if self.inner.chat_template is None:
            texts = [self.render_text(messages) for messages in conversations]
        else:
            texts = self.inner.apply_chat_template(
                [[dict(message) for message in messages] for messages in conversations],
                add_generation_prompt=True,
                tokenize=False,
            )
        encoded = self.inner(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]


def _stop_ids(inner: Any, directory: Path) -> frozenset[int]:
    """The tokenizer's end-of-text and the configured ones: chat models often have end-of-turn only there."""
    ids = {inner.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file():
            end = read_json(directory / name).get("eos_token_id")
            ids.update(end if isinstance(end, list) else [end])
    return frozenset(i for i in ids if isinstance(i, int))
