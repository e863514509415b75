"""The checksum of a transfer notices what can go wrong with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.weights.digest import CHUNK, with_pool
from penstock.weights.stored import tensors_checksum


def checksum(tensors: dict[str, torch.Tensor]) -> str:
    return with_pool(lambda pool: tensors_checksum(tensors, pool))


@settings(max_examples=60)
@given(size=st.integers(1, 20_000), where=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_every_bit_counts(size: int, where: int, bit: int) -> None:
    data = torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))
    before = checksum({"w": data})
    data[where % size] ^= 1 << bit
    assert checksum({"w": data}) != before


def test_a_bit_of_the_last_piece_counts() -> None:
    data = torch.zeros(2 * CHUNK + 5, dtype=torch.uint8)
    before = checksum({"w": data})
    for where in (0, CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 4):
        data[where] = 1
        assert checksum({"w": data}) != before
        data[where] = 0
    assert checksum({"w": data}) == before


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(4), "c": torch.ones(4)},
        {"a": torch.ones(4), "b": torch.zeros(4)},
        {"a": torch.zeros(2, 2), "b": torch.ones(4)},
        {"a": torch.zeros(4, dtype=torch.int32), "b": torch.ones(4)},
        {"a": torch.zeros(4)},
    ],
)
def test_names_shapes_dtypes_and_contents_belong_to_the_checksum(other: dict[str, torch.Tensor]) -> None:
    assert checksum(other) != checksum({"a": torch.zeros(4), "b": torch.ones(4)})


def test_swapped_pieces_are_noticed() -> None:
    data = torch.arange(CHUNK // 2, dtype=torch.int32)
    half = CHUNK // 4
    swapped = torch.cat([data[half:], data[:half]])
    assert checksum({"w": data}) != checksum({"w": swapped})
