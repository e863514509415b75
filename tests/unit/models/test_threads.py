from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from penstock.models.threads import release_threads

TASKS = Path("/proc/self/task")


def compute_and_release(counts: list[int]) -> None:
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1)
    counts.append(len(list(TASKS.iterdir())))
    release_threads()
    deadline = time.monotonic() + 10
    # A helper that was told to end is there until the kernel has let it run once more.
    while (left := len(list(TASKS.iterdir()))) != counts[0] - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    counts.append(left)
    assert torch.ones(1 << 20).add_(1).sum() == 2 << 20


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads in /proc")
def test_a_thread_that_rests_gives_its_helpers_back_and_can_compute_again() -> None:
    threads, counts = torch.get_num_threads(), list[int]()
    worker = threading.Thread(target=compute_and_release, args=(counts,))
    worker.start()
    worker.join()
    torch.set_num_threads(threads)
    computing, resting = counts
    assert resting == computing - 1
