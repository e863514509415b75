"""Whether a run that is resumed still has the prompts it began with.

A sampler's place in its sequence is a number of draws. With a row more or less, in another order or rendered otherwise,
the same number means other prompts: some would be drawn twice, others never. So a run writes a hash of every prompt of
every task before its first draw, and a resume compares.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.data.prompts import HASH_BYTES, PromptSet
from penstock.errors import CheckpointError, StorageError

FILE = "prompts.msgpack"


class _Remembered(msgspec.Struct, frozen=True):
    hashes: dict[str, bytes]
    """By task: `PromptSet.row_hashes`."""
    renderings: dict[str, bytes]
    """By task: `PromptSet.rendering_hash`."""


def remember_prompts(run_dir: Path, prompts: Mapping[str, PromptSet]) -> None:
    """Write down what the prompts of each task are; on disk when this returns. Raises StorageError."""
    path = run_dir / FILE
    new = path.with_suffix(".new")
    hashes = {task: found.row_hashes() for task, found in prompts.items()}
    renderings = {task: found.rendering_hash() for task, found in prompts.items()}
    content = msgspec.msgpack.encode(_Remembered(hashes, renderings))
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        directory = os.open(run_dir, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}") from error


def check_same_prompts(run_dir: Path, prompts: Mapping[str, PromptSet]) -> None:
    """Reads only. Raises CheckpointError when a task of the run now has other prompts, with what differs.

    A task that the run did not have is not compared, nor is anything when the run wrote nothing down.
    """
    path = run_dir / FILE
    try:
        run = msgspec.msgpack.decode(path.read_bytes(), type=_Remembered)
    except FileNotFoundError:
        return
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}, which says what the run's prompts are, cannot be read: {error}") from error
    problems = [
        f"task {task!r}: {difference}; the run cannot go on with other prompts: put them back, or begin a new run"
        for task, found in prompts.items()
        if task in run.hashes
        and (difference := _difference(run.hashes[task], run.renderings.get(task), found)) is not None
    ]
    if problems:
        raise CheckpointError(problems)


def _difference(before: bytes, rendering: bytes | None, prompts: PromptSet) -> str | None:
    now = prompts.row_hashes()
    if now == before:
        if rendering == prompts.rendering_hash():
            return None
        return f"its {len(prompts)} prompts are rendered otherwise; the model's chat template or tokenizer changed"
    then, rows = _rows(before), _rows(now)
    counts = f"it had {len(then)} prompts when the run began and has {len(rows)} now"
    first = next((index for index, (a, b) in enumerate(zip(then, rows, strict=False)) if a != b), None)
    if first is None:
        at = min(len(then), len(rows))
        if len(rows) > len(then):
            return f"{counts}; those from {prompts.place(at)} on are new"
        return f"{counts}; those after {prompts.place(at - 1)} are gone"
    where = prompts.place(first)
    if sorted(then) == sorted(rows):
        return f"{counts}, the same ones in another order; the first that differs is {where}"
    if len(then) == len(rows) and not set(then) & set(rows):
        return f"{counts}, and every one differs"
    if rows[first:] == then[first + len(then) - len(rows) :]:
        return f"{counts}; what stood before {where} is gone"
    if then[first:] == rows[first + len(rows) - len(then) :]:
        return f"{counts}; {where} is new"
    return f"{counts}; the first that differs is {where}"


def _rows(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
