"""What a trainer's configuration refuses by itself."""

from __future__ import annotations

import os

from penstock.recipes.tiny import trainer


def test_more_threads_than_a_machine_can_use_are_refused() -> None:
    (problem,) = trainer.replace("cpu_threads", 100_000).problems()
    assert problem.startswith("cpu_threads is 100000; this machine has ")
    assert list(trainer.replace("cpu_threads", 4 * (os.cpu_count() or 1)).problems()) == []
