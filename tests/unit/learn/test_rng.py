from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.errors import CheckpointError
from penstock.learn.rng import restore_rng, rng_state
from penstock.trainer.checkpoints import CheckpointStore


@pytest.fixture(autouse=True)
def leave_the_generators_as_they_were() -> Iterator[None]:
    tensors, state = rng_state()
    yield
    restore_rng(tensors, state)


def draws() -> list[float]:
    # The odd normal draw leaves the second of its pair waiting in the generator's state.
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        float(np.random.random()),
        torch.rand(3).sum().item(),
        torch.randn(1).item(),
    ]


def test_the_same_numbers_follow_after_a_checkpoint(tmp_path: Path) -> None:
    draws()
    tensors, state = rng_state()
    store = CheckpointStore(tmp_path)
    asyncio.run(store.save(1, tensors={"rng": tensors}, state={"rng": state}, config={}))
    expected = [draws(), draws()]
    found = store.newest()
    restore_rng(found.tensors("rng"), found.state["rng"])
    assert [draws(), draws()] == expected


def test_the_same_numbers_follow_in_another_process(tmp_path: Path) -> None:
    draws()
    tensors, state = rng_state()
    store = CheckpointStore(tmp_path)
    asyncio.run(store.save(1, tensors={"rng": tensors}, state={"rng": state}, config={}))
    program = f"""
import json, pathlib, random, numpy, torch
from penstock.trainer.checkpoints import CheckpointStore
from penstock.learn.rng import restore_rng
found = CheckpointStore(pathlib.Path({str(tmp_path)!r})).newest()
restore_rng(found.tensors("rng"), found.state["rng"])
print(json.dumps([random.gauss(0, 1), float(numpy.random.standard_normal()), torch.rand(3).tolist()]))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    here = [random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(3).tolist()]
    assert json.loads(answer.stdout) == here


@pytest.mark.parametrize("spoil", ["python", "numpy", "torch", "missing", "device"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(spoil: str) -> None:
    tensors, state = rng_state()
    if spoil == "python":
        state = state | {"python": [3, [1, 2], None]}
    elif spoil == "numpy":
        state = state | {"numpy": {"bit_generator": "PCG64"}}
    elif spoil == "torch":
        tensors = tensors | {"cpu": torch.zeros(3, dtype=torch.uint8)}
    elif spoil == "missing":
        state = {}
    elif torch.cuda.is_available():
        tensors = tensors | {"cuda:999": tensors["cpu"]}
    else:
        tensors = tensors | {"cuda:0": tensors["cpu"]}
    before = rng_state()
    with pytest.raises(CheckpointError, match="random number generators"):
        restore_rng(tensors, state)
    after = rng_state()
    assert before[1] == after[1]
    assert torch.equal(before[0]["cpu"], after[0]["cpu"])


def test_checkpoints_are_light_to_import() -> None:
    program = (
        "import sys; import penstock.trainer.checkpoints, penstock.learn.rng, penstock.trainer.config_changes; "
        "print([m for m in ('torch', 'safetensors.torch', 'ray', 'transformers') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"
