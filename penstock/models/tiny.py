"""The `tiny` model: two layers over characters, made on the spot, so that a whole run fits into a minute of CPU.

Its task is to reverse words of the letters a to h. It is taught well at first and badly then: two letters are mostly
written as their neighbour in the alphabet, the others now and then. So it knows the form of an answer, samples the
right one about every third time, and its most likely answer is wrong more often than not. Reinforcement learning has
to do the rest.

    prompt `fead>`, right answer `daef` and end-of-text

The same seed gives the same weights on the same CPU and versions.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def make_tiny(directory: Path, seed: int = 0, lessons: int = 400) -> None:
    """Write the model and its tokenizer into `directory`; takes a few seconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    tokenizer = _tokenizer()
    threads = torch.get_num_threads()
    progress_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # One thread: faster at this size, and the sums do not depend on the number of cores.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=len(tokenizer),
                    hidden_size=64,
                    intermediate_size=128,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=CONTEXT,
                    tie_word_embeddings=True,
                    bos_token_id=None,
                    eos_token_id=tokenizer.eos_token_id,
                    pad_token_id=tokenizer.pad_token_id,
                )
            )
            _teach(model, _lessons(tokenizer, lessons, torch.Generator().manual_seed(seed)), lessons)
            model.eval()
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    finally:
        torch.set_num_threads(threads)
        if progress_bars:
            logging.enable_progress_bar()


def _tokenizer() -> Any:
    """Every printable ASCII character is a token, so that tests and other tasks can use the model too."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [c for c in string.printable if c.isprintable() or c == "\n"]
    vocabulary = {token: i for i, token in enumerate([_PAD, _END, _UNKNOWN, *characters])}
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


def _lessons(tokenizer: Any, number: int, generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (ids, labels): words of one length a batch, so that nothing is padded; labels only on the answer."""
    import torch

    letters = torch.tensor(tokenizer.convert_tokens_to_ids(list(LETTERS)))
    share_wrong = torch.tensor(_WRONG)
    ask, end = tokenizer.convert_tokens_to_ids(">"), tokenizer.eos_token_id
    for lesson in range(number):
        length = MIN_LENGTH + lesson % (MAX_LENGTH - MIN_LENGTH + 1)
        words = torch.randint(len(LETTERS), (_LESSON_WORDS, length), generator=generator)
        answers = words.flip(1)
        wrong = torch.rand(words.shape, generator=generator) < share_wrong[answers] * (lesson >= _GOOD_LESSONS * number)
        answers = torch.where(wrong, (answers + 1) % len(LETTERS), answers)
        column = torch.ones(_LESSON_WORDS, 1, dtype=torch.long)
        ids = torch.cat([letters[words], ask * column, letters[answers], end * column], dim=1)
        labels = ids.clone()
        labels[:, : length + 1] = -100
        yield ids, labels


def _teach(model: Any, lessons: Iterator[tuple[torch.Tensor, torch.Tensor]], number: int) -> None:
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=5e-3, total_steps=number, pct_start=0.1)
    for ids, labels in lessons:
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
