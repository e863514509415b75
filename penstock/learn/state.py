"""What a restart needs of a learner, as flat tensors in two files: its weights, and its optimiser with the step count.

model.safetensors       the weights by their Hugging Face names, tied ones once
optimizer.safetensors   `<moment>.<parameter name>` and `steps_done`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.errors import CheckpointError, StorageError
from penstock.learn.save import holds_tensors, write_tensors

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"

Parameters = Mapping[str, Parameter]


def weights_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The live weights by their Hugging Face names; tied ones once, under the name of the first."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def optimizer_state(optimizer: Optimizer, parameters: Parameters, steps_done: int) -> dict[str, Tensor]:
    state = {"steps_done": torch.tensor(steps_done)}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{key}.{name}"] = value
    return state


def set_optimizer_state(optimizer: Optimizer, parameters: Parameters, state: Mapping[str, Tensor]) -> int:
    """Take what `optimizer_state` gave; returns the step count."""
    optimizer.state.clear()
    for name, values in _by_parameter(state).items():
        parameter = parameters[name]
        optimizer.state[parameter] = {key: value.to(parameter.device, copy=True) for key, value in values.items()}
    return int(state["steps_done"])


def write_state(directory: Path, model: Any, optimizer: Mapping[str, Tensor]) -> None:
    """Raises StorageError when the disk fails or gives back something else."""
    for name, tensors in ((MODEL, dict(weights_of(model))), (OPTIMIZER, optimizer)):
        path = directory / name
        try:
            write_tensors(path, tensors)
            if not holds_tensors(path, tensors):
                raise OSError("it is not what was given; something changed it while it was written")
        except OSError as error:
            raise StorageError(f"{path} could not be written: {error}") from error


def read_state(directory: Path, model: Any, parameters: Parameters) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, optimiser state) that fit this model. Raises CheckpointError with all that does not."""
    weights, state = _load(directory / MODEL), _load(directory / OPTIMIZER)
    own = dict(weights_of(model))
    wrong = [name for name in own.keys() | weights.keys() if not _same_shape(own.get(name), weights.get(name))]
    problems = [f"the weights are not of this model: {sorted(wrong)[:3]} are missing or differ"] if wrong else []
    problems += _state_problems(parameters, state)
    if problems:
        raise CheckpointError([f"{directory}: {problem}" for problem in problems])
    return weights, state


def _state_problems(parameters: Parameters, state: Mapping[str, Tensor]) -> list[str]:
    moments = _by_parameter(state)
    unknown = [name for name in moments if name not in parameters]
    missing = [name for name in parameters if moments and name not in moments]
    misshapen = [
        name
        for name, values in moments.items()
        if name in parameters and any(v.dim() and v.shape != parameters[name].shape for v in values.values())
    ]
    if not unknown and not missing and not misshapen and "steps_done" in state:
        return []
    return [
        f"the optimiser state is not of this model: unknown {unknown[:3]}, missing {missing[:3]}, "
        f"of another shape {misshapen[:3]}{'' if 'steps_done' in state else ', no steps_done'}"
    ]


def _by_parameter(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for path, value in state.items():
        key, _, name = path.partition(".")
        if name:
            moments[name][key] = value
    return moments


def _load(path: Path) -> dict[str, Tensor]:
    try:
        loaded: dict[str, Tensor] = load_file(path)
        return loaded
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error


def _same_shape(own: Tensor | None, other: Tensor | None) -> bool:
    return own is not None and other is not None and own.shape == other.shape
