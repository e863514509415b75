"""The `tiny` model: two layers over characters, made on the spot, so that a whole run fits into a minute of CPU.

Its task is to reverse words of the letters a to h. It is taught well at first and badly then: two letters are mostly
written as their neighbour in the alphabet, the others now and then. So it knows the form of an answer, samples the
right one about every third time, and its most likely answer is wrong more often than not. Reinforcement learning has
to do the rest.

    prompt `fead>`, right answer `daef` and end-of-text

`tiny-teacher` is its twin that was only taught well, for distillation.

The same seed gives the same weights on the same CPU and versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.models.lessons import CHARACTERS, make_taught

if TYPE_CHECKING:
    import torch

LETTERS = "abcdefgh"
MIN_LENGTH, MAX_LENGTH = 4, 6
CONTEXT = 128
_PAD, _END, _UNKNOWN = "<pad>", "<end>", "<unknown>"
_WRONG = (0.55, 0.06, 0.06, 0.06, 0.55, 0.06, 0.06, 0.06)
"""For each letter, how often the later lessons write the next one instead."""
_GOOD_LESSONS = 0.65
"""The share of lessons that come first and are right."""
_LESSON_WORDS = 64


def make_teacher(directory: Path) -> None:
    make_tiny(directory, good_lessons=1.0)


def make_tiny(directory: Path, seed: int = 0, lessons: int = 400, good_lessons: float = _GOOD_LESSONS) -> None:
    """Write the model and its tokenizer into `directory`; takes a few seconds."""
    import torch

    tokenizer = character_tokenizer()
    num_good = good_lessons * lessons

    def taught(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return _lessons(tokenizer, lessons, num_good, torch.Generator().manual_seed(seed))

    make_taught(directory, tokenizer, taught, lessons, context=CONTEXT, seed=seed)


def character_tokenizer() -> Any:
    """Every printable ASCII character is a token, so that tests and other tasks can use the model too."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([_PAD, _END, _UNKNOWN, *CHARACTERS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=_PAD,
        eos_token=_END,
        unk_token=_UNKNOWN,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _lessons(
    tokenizer: Any, number: int, num_good: float, generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (ids, labels): words of one length a batch, so that nothing is padded; labels only on the answer."""
    import torch

    letters = torch.tensor(tokenizer.convert_tokens_to_ids(list(LETTERS)))
    share_wrong = torch.tensor(_WRONG)
    ask, end = tokenizer.convert_tokens_to_ids(">"), tokenizer.eos_token_id
    for lesson in range(number):
        length = MIN_LENGTH + lesson % (MAX_LENGTH - MIN_LENGTH + 1)
        words = torch.randint(len(LETTERS), (_LESSON_WORDS, length), generator=generator)
        answers = words.flip(1)
        wrong = torch.rand(words.shape, generator=generator) < share_wrong[answers] * (lesson >= num_good)
        answers = torch.where(wrong, (answers + 1) % len(LETTERS), answers)
        column = torch.ones(_LESSON_WORDS, 1, dtype=torch.long)
        ids = torch.cat([letters[words], ask * column, letters[answers], end * column], dim=1)
        labels = ids.clone()
        labels[:, : length + 1] = -100
        yield ids, labels
