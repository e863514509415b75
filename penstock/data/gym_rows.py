"""Makes the entries of a reasoning-gym task; `penstock.data.gym` runs this file as a process of its own.

Some tasks draw from Python's global generator, or in the order of a set, which changes from process to process. Here
the hash seed is fixed from outside and the global generator is seeded per entry, so that a restarted run gets the
same prompts. Reads one JSON object from standard input and writes one per line: an entry, or what went wrong.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any


def entries(name: str, seed: int, params: dict[str, Any], size: int, count: int) -> Iterator[dict[str, Any]]:
    """The first `count` entries of a task of `size`. Raises what the task raises."""
    import reasoning_gym

    random.seed(f"{seed}")
    dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **params)
    for index in range(count):
        random.seed(f"{seed}:{index}")
        entry = dataset[index]
        stored = json.loads(json.dumps(entry))
        if index == 0:
            check_scorer(dataset, entry, stored)
        yield {"entry": stored}


def check_scorer(dataset: Any, entry: dict[str, Any], stored: dict[str, Any]) -> None:
    """Refuse a task whose scorer answers otherwise once its entry was stored: tuples come back as lists."""
    answer = entry["answer"] or ""
    expected = dataset.score_answer(answer, entry)
    try:
        found = dataset.score_answer(answer, stored)
    except Exception as error:  # any difference from the original refuses the task
        found = f"{type(error).__name__}: {error}"
    if found != expected:
        raise ValueError(f"its scorer gives {found} instead of {expected} for an entry that was stored as JSON")


def main() -> None:
    # Tasks print; the lines that are read back must not be mixed with that.
    lines, sys.stdout = sys.stdout, sys.stderr
    try:
        for row in entries(**json.load(sys.stdin)):
            lines.write(json.dumps(row) + "\n")
    except Exception as error:  # a task may raise anything; the reader gives it a type
        lines.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
