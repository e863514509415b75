"""Small models that are made on the spot: two layers over characters, taught for some seconds.

The same seed gives the same weights on the same CPU and versions.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ModelError

if TYPE_CHECKING:
    import torch

    Lesson = tuple[torch.Tensor, torch.Tensor]
    """A batch of ids, and of labels: -100 where nothing is to be learnt."""

_SEEDS = 8
CHARACTERS = [c for c in string.printable if c.isprintable() or c == "\n"]


def make_taught(
    directory: Path,
    tokenizer: Any,
    lessons: Callable[[int], Iterable[Lesson]],
    number: int,
    *,
    context: int,
    seed: int,
    passes: Callable[[Any], bool] | None = None,
) -> None:
    """Write a model that was taught `number` lessons, those of its seed, and its tokenizer, into `directory`.

    One that does not pass is made again from the next seed. Raises ModelError when none of them passes.
    """
    import torch
    from transformers.utils import logging

    threads = torch.get_num_threads()
    progress_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # One thread: faster at this size, and the sums do not depend on the number of cores.
    torch.set_num_threads(1)
    try:
        for attempt in range(seed, seed + _SEEDS):
            model = _taught(tokenizer, lessons(attempt), number, context, attempt)
            if passes is None or passes(model):
                break
        else:
            raise ModelError(
                f"none of {_SEEDS} models that were taught for {directory.name} passed its exam on this CPU"
            )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    finally:
        torch.set_num_threads(threads)
        if progress_bars:
            logging.enable_progress_bar()


def _taught(tokenizer: Any, lessons: Iterable[Lesson], number: int, context: int, seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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
                max_position_embeddings=context,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
        _teach(model, lessons, number)
    return model.eval()


def _teach(model: Any, lessons: Iterable[Lesson], number: int) -> None:
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=5e-3, total_steps=number, pct_start=0.1)
    for ids, labels in lessons:
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
