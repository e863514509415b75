"""Built-in tasks that need no file: prompts made from a seed, split into train and eval without overlap.

Every generator walks its space of questions in an order that depends on the seed alone. The first `held_out`
questions are the eval split, those after them the train split: disjoint always, and the eval split stays the same
when the train split grows.
"""

from __future__ import annotations

import abc
import itertools
import operator
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import pydantic

from penstock.data.prompts import Limits, OnProgress, Place, PromptScan, PromptSet, PromptSourceConfig
from penstock.ports import Tokenizer
from penstock.rollout import Prompt, new_rollout

Split = Literal["train", "eval"]


class GeneratorConfig(PromptSourceConfig):
    """A task made from a seed. Subclasses say what is asked: `prompts`."""

    placeholders: ClassVar[frozenset[str]]

    template: str
    """What the model is asked, with the generator's placeholders in braces."""
    data_source: str = pydantic.Field(min_length=1)
    """What its rows are called, for a judger with branches and for metrics."""
    split: Split = "train"
    """Which of the two, which never overlap."""
    held_out: int = pydantic.Field(default=100, ge=0)
    """The size of the eval split."""
    seed: int = 0
    """Of the order of questions. Both splits need the same."""

    @pydantic.field_validator("template")
    @classmethod
    def _template_has_its_placeholders(cls, template: str) -> str:
        wanted = " and ".join(f"{{{name}}}" for name in sorted(cls.placeholders))
        try:
            found = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        except ValueError as error:
            raise ValueError(f"it must be a format string with {wanted} ({error})") from None
        if found != cls.placeholders:
            raise ValueError(f"it must have exactly the placeholders {wanted}")
        return template

    def problems(self) -> Iterator[str]:
        if self.split == "eval" and self.held_out == 0:
            yield "held_out is 0; the eval split needs at least 1."

    @abc.abstractmethod
    def prompts(self) -> Iterator[Prompt]:
        """The split's prompts, not yet rendered."""

    def load(
        self,
        tokenizer: Tokenizer,
        *,
        context: int | None,
        max_tokens: int,
        data_sources: frozenset[str] | None,
        on_progress: OnProgress | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> PromptSet:
        self.check()
        name = type(self).__name__
        limits = Limits(max_tokens, context, data_sources, tools=tuple(dict(tool) for tool in tools))
        scan = PromptScan(tokenizer, limits, source=name, on_progress=on_progress)
        for number, prompt in enumerate(self.prompts(), start=1):
            scan.add(Place(name, number), prompt)
        return scan.finish()

    def _ask(self, ground_truth: Any, **values: Any) -> Prompt:
        text = self.template.format(**values)
        return new_rollout(text, ground_truth=ground_truth, data_source=self.data_source).prompt


class AdditionConfig(GeneratorConfig):
    """Sums of two numbers from 0 to `max_number`; every pair is in one of the splits."""

    placeholders = frozenset({"a", "b"})

    max_number: int = pydantic.Field(default=20, ge=0, le=2000)
    """The largest summand."""
    template: str = "What is {a} + {b}? Answer with the number only."
    data_source: str = pydantic.Field(default="addition", min_length=1)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        pairs = (self.max_number + 1) ** 2
        if self.held_out > pairs or (self.split == "train" and self.held_out == pairs):
            yield f"held_out is {self.held_out}; there are {pairs} pairs up to max_number {self.max_number}."

    def prompts(self) -> Iterator[Prompt]:
        base = self.max_number + 1
        pairs = draw_distinct(random.Random(self.seed), base * base)
        first, last = (0, self.held_out) if self.split == "eval" else (self.held_out, None)
        for index in itertools.islice(pairs, first, last):
            a, b = divmod(index, base)
            yield self._ask(str(a + b), a=a, b=b)


class WordConfig(GeneratorConfig):
    """A task over random words. No word occurs twice; lengths take turns while there are words left."""

    placeholders = frozenset({"word"})

    alphabet: str = "abcdefgh"
    """The letters of the words."""
    min_length: int = pydantic.Field(default=2, ge=1)
    """Of a word."""
    max_length: int = pydantic.Field(default=5, ge=1, le=1000)
    """Of a word."""
    size: int = pydantic.Field(default=1000, ge=1)
    """The size of the train split."""

    @pydantic.field_validator("alphabet")
    @classmethod
    def _letters_are_distinct(cls, alphabet: str) -> str:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise ValueError("it must hold at least one letter, and none twice")
        return alphabet

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.min_length > self.max_length:
            yield f"min_length is {self.min_length}; it must be at most max_length, which is {self.max_length}."
            return
        words = sum(len(self.alphabet) ** length for length in self._lengths())
        if self.size + self.held_out > words:
            yield (
                f"size {self.size} and held_out {self.held_out} need {self.size + self.held_out} words; "
                f"the alphabet and the lengths give {words}."
            )

    @abc.abstractmethod
    def answer(self, word: str) -> str: ...

    def prompts(self) -> Iterator[Prompt]:
        first, last = (0, self.held_out) if self.split == "eval" else (self.held_out, self.held_out + self.size)
        for word in itertools.islice(self._words(), first, last):
            yield self._ask(self.answer(word), word=word)

    def _lengths(self) -> range:
        return range(self.min_length, self.max_length + 1)

    def _words(self) -> Iterator[str]:
        streams = [self._words_of(length) for length in self._lengths()]
        while streams:
            remaining = []
            for stream in streams:
                if (word := next(stream, None)) is not None:
                    yield word
                    remaining.append(stream)
            streams = remaining

    def _words_of(self, length: int) -> Iterator[str]:
        base = len(self.alphabet)
        for index in draw_distinct(random.Random(f"{self.seed}:{length}"), base**length):
            letters = []
            for _ in range(length):
                index, digit = divmod(index, base)
                letters.append(self.alphabet[digit])
            yield "".join(letters)


class ReverseWordConfig(WordConfig):
    """Words to write backwards."""

    template: str = "Write the word {word} backwards. Answer with the word only."
    data_source: str = pydantic.Field(default="reverse_word", min_length=1)

    def answer(self, word: str) -> str:
        return word[::-1]


class SortLettersConfig(WordConfig):
    """The letters in the order of the alphabet as it is configured."""

    template: str = "Sort the letters of {word} by the alphabet. Answer with the sorted letters only."
    data_source: str = pydantic.Field(default="sort_letters", min_length=1)

    def answer(self, word: str) -> str:
        return "".join(sorted(word, key=self.alphabet.index))


class OneLineFunctionConfig(GeneratorConfig):
    """Functions of one line, named `f`: add, subtract or multiply by a number from 10 to 99. The ground truth are tests
    for `CodeJudgerConfig`."""

    placeholders = frozenset({"task"})

    template: str = "Write a Python function f(x) of one line that does: {task}. Answer with the code only."
    data_source: str = pydantic.Field(default="one_line_function", min_length=1)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.held_out > 270 or (self.split == "train" and self.held_out == 270):
            yield f"held_out is {self.held_out}; there are 270 functions."

    def prompts(self) -> Iterator[Prompt]:
        first, last = (0, self.held_out) if self.split == "eval" else (self.held_out, None)
        for index in itertools.islice(draw_distinct(random.Random(self.seed), 270), first, last):
            operation, number = divmod(index, 90)
            word, function = _OPERATIONS[operation]
            given = [0, 1, 7, -3]
            tests = {
                "fn_name": "f",
                "inputs": [[x] for x in given],
                "outputs": [function(x, 10 + number) for x in given],
            }
            yield self._ask(tests, task=f"{word} {10 + number}")


_OPERATIONS = (("add", operator.add), ("sub", operator.sub), ("mul", operator.mul))


def draw_distinct(rng: random.Random, total: int) -> Iterator[int]:
    """The numbers below `total` in random order, one by one: a shuffle that holds only what was drawn."""
    moved: dict[int, int] = {}
    for first in range(total):
        pick = rng.randrange(first, total)
        yield moved.get(pick, pick)
        moved[pick] = moved.pop(first, first)
