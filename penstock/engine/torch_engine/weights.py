"""Hugging Face names to places in the engine's layout. A load is checked as a whole before the first byte is copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.errors import WeightSyncError
from penstock.ports import WeightSource

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
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(given[name])


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
