"""Tensors in a file, as safetensors reads them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.learn.save import holds_tensors, write_tensors

TENSORS: dict[str, Tensor] = {
    "weights": torch.arange(12, dtype=torch.float32).view(3, 4),
    "turned": torch.arange(12, dtype=torch.float32).view(3, 4).t(),
    "half": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    "steps_done": torch.tensor(7),
    "none": torch.zeros(0, 3),
    "state": torch.arange(5, dtype=torch.uint8),
    "mask": torch.tensor([True, False]),
    'a "name" of its own, ü': torch.ones(1, dtype=torch.float64),
}


@pytest.mark.parametrize("names", [list(TENSORS), ["weights"], ["steps_done"], ["none"], []])
def test_safetensors_reads_what_was_given_and_the_sum_is_of_the_whole_file(tmp_path: Path, names: list[str]) -> None:
    tensors = {name: TENSORS[name] for name in names}
    written = write_tensors(tmp_path / "ours", tensors)
    content = (tmp_path / "ours").read_bytes()
    loaded = load_file(tmp_path / "ours")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert (written.size, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert holds_tensors(tmp_path / "ours", tensors)


def test_tensors_of_one_dtype_are_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        name: torch.full((size, 3), size / 7) for size, name in enumerate(("z", "b", "a", "layers.1", "layers.10"))
    }
    write_tensors(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    dtypes += [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {str(dtype): torch.tensor([0, 1, 1]).to(dtype) for dtype in dtypes}
    write_tensors(tmp_path / "file", tensors)
    assert holds_tensors(tmp_path / "file", tensors)


def test_a_dtype_that_the_file_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pairs is complex128"):
        write_tensors(tmp_path / "file", {"pairs": torch.zeros(2, dtype=torch.complex128)})
    assert not (tmp_path / "file").exists()


def test_two_names_of_one_memory_are_refused(tmp_path: Path) -> None:
    shared = torch.zeros(3)
    with pytest.raises(RuntimeError, match="a and b share memory"):
        write_tensors(tmp_path / "file", {"a": shared, "b": shared})
    assert not (tmp_path / "file").exists()
