"""Hugging Face names to places in the engine's layout. A load is checked as a whole before the first byte is copied."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from penstock.errors import WeightSyncError
from penstock.ports import WeightSource

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""numpy does not know every dtype of torch; a copy does not care."""
_THREADS = min(4, os.cpu_count() or 1)
Places = Mapping[str, Tensor]
"""Where each named tensor goes: a view of the engine's own memory in the shape of the named tensor."""


def load_into(places: Places, source: WeightSource, *, optional: frozenset[str] = frozenset()) -> None:
    """Copy every tensor of `source` to its place, converting dtype and layout; all or nothing.

    `optional` names may be absent or present and are ignored: they are other names of tensors in `places`.
    """
    given, twice = _read(source)
    wrong = [f"{name} was given twice" for name in twice]
    wrong += [f"{name} is missing" for name in places.keys() - given.keys()]
    wrong += [f"{name} is not a weight of this model" for name in given.keys() - places.keys() - optional]
    wrong += [
        f"{name} has shape {tuple(given[name].shape)}; the model needs {tuple(place.shape)}"
        for name, place in places.items()
        if name in given and given[name].shape != place.shape
    ]
    if wrong:
        shown = "; ".join(sorted(wrong)[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise WeightSyncError(f"weights refused, the old ones are kept: {shown}")
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="penstock-load") as pool:
        list(pool.map(_copy, places.values(), [given[name] for name in places]))


@torch.inference_mode()
def _copy(place: Tensor, given: Tensor) -> None:
    """Through numpy where nothing is converted: the threads of torch wait for each other on a busy machine."""
    if place.dtype == given.dtype and place.device.type == given.device.type == "cpu" and place.itemsize in _WORDS:
        word = _WORDS[place.itemsize]
        np.copyto(place.detach().view(word).numpy(), given.detach().view(word).numpy())
    else:
        place.copy_(given)


def _read(source: WeightSource) -> tuple[dict[str, Tensor], list[str]]:
    given: dict[str, Tensor] = {}
    twice: list[str] = []
    try:
        for name, tensor in source.tensors():
            if name in given:
                twice.append(name)
            given[name] = tensor
    except Exception as error:
        raise WeightSyncError(f"the weights could not be read, the old ones are kept: {error!r}") from error
    return given, twice
