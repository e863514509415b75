"""The random numbers of this process: where Python's, NumPy's and torch's global generators stand, and back."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = "plain"


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(torch's generators, by device; Python's and NumPy's as plain data)."""
    import torch

    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    version, internal, gauss = random.getstate()
    return tensors, {"python": [version, list(internal), gauss], "numpy": _plain(np.random.get_state(legacy=False))}


def restore_rng(tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Raises CheckpointError, nothing changed, when they are not what `rng_state` gave or a device is missing."""
    before = rng_state()
    missing = sorted(tensors.keys() - before[0].keys())
    if missing:
        raise CheckpointError(f"the random number generators of {missing} were saved; there is no such device here")
    try:
        _restore(tensors, state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        _restore(*before)
        raise CheckpointError(
            f"the state of the random number generators cannot be used: {type(error).__name__}: {error}"
        ) from error


def rng_tensors() -> dict[str, Tensor]:
    """All of it as tensors, for the file of a rank."""
    import torch

    tensors, plain = rng_state()
    return tensors | {PLAIN: torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)}


def restore_rng_tensors(tensors: dict[str, Tensor]) -> None:
    """What `rng_tensors` gave. Raises CheckpointError, nothing changed."""
    try:
        plain = json.loads(tensors[PLAIN].numpy().tobytes())
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"the state of the random number generators cannot be used: {error}") from error
    restore_rng({device: state for device, state in tensors.items() if device != PLAIN}, plain)


def _restore(tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    import torch

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    # A copy: torch reads from where the memory of a tensor begins, also when the tensor begins later.
    torch.set_rng_state(tensors["cpu"].clone())
    for device, generator in tensors.items():
        if device != "cpu":
            torch.cuda.set_rng_state(generator.clone(), device)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
