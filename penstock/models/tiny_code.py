"""The `tiny-code` model: two layers over characters that write a function of one line, made on the spot.

    prompt `sub 34>`, right answer `def f(x): return x-34` and end-of-text

It is taught well at first and badly then, as `tiny`: one operation and two digits are mostly written as the next one,
the others now and then. So it writes the right function about every third time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.models.lessons import make_taught
from penstock.models.tiny import CONTEXT, character_tokenizer

if TYPE_CHECKING:
    import torch

OPERATIONS = {"add": "+", "sub": "-", "mul": "*"}
"""What is asked for, with a number from 10 to 99, and how it is written."""
QUESTION, ANSWER = "add 10>", "def f(x): return x+10"
"""All have one length."""
_WRONG_OPERATIONS = (0.2, 0.55, 0.2)
_WRONG_DIGITS = (0.2, 0.2, 0.2, 0.55, 0.2, 0.2, 0.2, 0.55, 0.2, 0.2)
_GOOD_LESSONS = 0.65
_LESSON_FUNCTIONS = 64


def make_tiny_code(directory: Path, seed: int = 0, lessons: int = 300) -> None:
    """Write the model and its tokenizer into `directory`; takes some seconds."""
    import torch

    tokenizer = character_tokenizer()

    def taught(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return _lessons(tokenizer, lessons, torch.Generator().manual_seed(seed))

    make_taught(directory, tokenizer, taught, lessons, context=CONTEXT, seed=seed)


def _lessons(tokenizer: Any, number: int, generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (ids, labels); labels only on the answer."""
    import torch

    words = torch.tensor([tokenizer.convert_tokens_to_ids(list(word)) for word in OPERATIONS])
    signs = torch.tensor(tokenizer.convert_tokens_to_ids(list(OPERATIONS.values())))
    numerals = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    wrong_operations, wrong_digits = torch.tensor(_WRONG_OPERATIONS), torch.tensor(_WRONG_DIGITS)
    form = torch.tensor([*tokenizer.convert_tokens_to_ids([*QUESTION, *ANSWER]), tokenizer.eos_token_id])
    asked_at, sign_at = slice(4, 6), len(QUESTION + ANSWER) - 3
    for lesson in range(number):
        badly = lesson >= _GOOD_LESSONS * number
        operations = torch.randint(len(OPERATIONS), (_LESSON_FUNCTIONS,), generator=generator)
        digits = torch.randint(10, (_LESSON_FUNCTIONS, 2), generator=generator)
        digits[:, 0] = 1 + digits[:, 0] % 9
        slips = torch.rand(_LESSON_FUNCTIONS, 3, generator=generator)
        written = (operations + (slips[:, 0] < wrong_operations[operations]) * badly) % len(OPERATIONS)
        copied = (digits + (slips[:, 1:] < wrong_digits[digits]) * badly) % 10
        ids = form.repeat(_LESSON_FUNCTIONS, 1)
        ids[:, :3], ids[:, asked_at] = words[operations], numerals[digits]
        ids[:, sign_at], ids[:, sign_at + 1 : sign_at + 3] = signs[written], numerals[copied]
        labels = ids.clone()
        labels[:, : len(QUESTION)] = -100
        yield ids, labels
