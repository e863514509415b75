"""What a restart needs of a learner, as flat tensors in two files: its weights, and its optimiser with the step count.

    model.safetensors       the weights by their Hugging Face names, tied ones once; with LoRA the adapter alone
    optimizer.safetensors   `<moment>.<parameter name>` and `steps_done`

Ranks that share the weights write `model_0.safetensors`, `model_1.safetensors` and so on instead, each the rows that it
has; the whole is what they give one after the other. Whoever reads takes the rows it needs, from however many files.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.errors import CheckpointError, StorageError
from penstock.learn.lora import adapters_of, own_tensors
from penstock.learn.save import holds_tensors, write_tensors
from penstock.learn.shard import own, own_rows
from penstock.unbuffered import FileSum

MODEL, OPTIMIZER = "model", "optimizer"

T = TypeVar("T")
Parameters = Mapping[str, Parameter]


def weights_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The live weights by their Hugging Face names; tied ones once, under the name of the first. Of an adapted model
    the adapter alone: the rest does not change."""
    if adapters_of(model):
        yield from own_tensors(model)
        return
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
    """Take what `optimizer_state` gave, or this rank's rows of it; returns the step count."""
    optimizer.state.clear()
    for name, values in _by_parameter(state).items():
        parameter = parameters[name]
        optimizer.state[parameter] = {key: _placed(value, parameter) for key, value in values.items()}
    return int(state["steps_done"])


def write_state(
    directory: Path,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    *,
    shard: int | None = None,
    changing: bool = True,
) -> dict[str, FileSum]:
    """The files with their sums. `changing` tensors, which others may write to meanwhile, are compared with what was
    written. Raises StorageError when that is something else, or the disk fails."""
    sums: dict[str, FileSum] = {}
    for name, tensors in ((MODEL, weights), (OPTIMIZER, optimizer)):
        path = directory / _file_name(name, shard)
        rows = {key: own(tensor) for key, tensor in tensors.items()}
        try:
            sums[path.name] = write_tensors(path, rows)
            if changing and not holds_tensors(path, rows):
                raise OSError("it is not what was given; something changed it while it was written")
        except OSError as error:
            raise StorageError(f"{path} could not be written: {error}") from error
    return sums


def read_state(directory: Path, model: Any, parameters: Parameters) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, optimiser state) that fit this model, of sharded ones this rank's rows.

    Raises CheckpointError with all that does not fit.
    """
    weights, state = _Saved(directory, MODEL), _Saved(directory, OPTIMIZER)
    own_weights = dict(weights_of(model))
    wrong = [
        name
        for name in own_weights.keys() | weights.shapes.keys()
        if name not in own_weights or weights.shapes.get(name) != tuple(own_weights[name].shape)
    ]
    problems = [f"the weights are not of this model: {sorted(wrong)[:3]} are missing or differ"] if wrong else []
    problems += _state_problems(parameters, state.shapes)
    if problems:
        raise CheckpointError([f"{directory}: {problem}" for problem in problems])
    return (
        {name: weights.read(name, tensor) for name, tensor in own_weights.items()},
        {key: state.read(key, parameters.get(key.partition(".")[2])) for key in state.shapes},
    )


class _Saved:
    """Tensors in one file, or in several that have some rows each."""

    def __init__(self, directory: Path, name: str) -> None:
        whole = directory / _file_name(name)
        shards = [directory / _file_name(name, number) for number in range(len(list(directory.glob(f"{name}_*"))))]
        self._whole = whole
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of the whole tensors."""
        self._places: dict[str, list[Any]] = defaultdict(list)
        """The files that have some of a tensor, in order."""
        with self._errors():
            for path in shards if shards and not whole.exists() else [whole]:
                file: Any = safe_open(path, framework="pt")
                for key in file.keys():  # noqa: SIM118 - the file is not a mapping
                    shape = tuple(file.get_slice(key).get_shape())
                    known = self.shapes.get(key)
                    self.shapes[key] = (known[0] + shape[0], *shape[1:]) if known and shape else shape
                    self._places[key].append(file)

    def read(self, key: str, like: Tensor | None) -> Tensor:
        """All of it, or of one that is sharded like `like` the rows that belong to this rank."""
        shape, places = self.shapes[key], self._places[key]
        with self._errors():
            if not shape:
                number: Tensor = places[0].get_tensor(key)
                return number
            rows = own_rows(like) if like is not None else slice(0, shape[0])
            pieces: list[Tensor] = []
            start = 0
            for part in (file.get_slice(key) for file in places):
                end = start + part.get_shape()[0]
                low, high = max(rows.start, start), min(rows.stop, end)
                if low < high:
                    pieces.append(part[low - start : high - start])
                start = end
            return torch.cat(pieces or [places[0].get_slice(key)[:0]])

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._whole} cannot be loaded: {error}") from error


def _file_name(name: str, shard: int | None = None) -> str:
    return f"{name}.safetensors" if shard is None else f"{name}_{shard}.safetensors"


def _placed(value: Tensor, parameter: Parameter) -> Tensor:
    """A copy beside the parameter, sharded as it is; a plain number stays one."""
    if not value.dim():
        return value.to(parameter.device, copy=True)
    placed = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    own(placed).copy_(own(value))
    return placed


def _state_problems(parameters: Parameters, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    moments = _by_parameter(shapes)
    unknown = [name for name in moments if name not in parameters]
    missing = [name for name in parameters if moments and name not in moments]
    misshapen = [
        name
        for name, found in moments.items()
        if name in parameters and any(shape and shape != tuple(parameters[name].shape) for shape in found.values())
    ]
    if not unknown and not missing and not misshapen and "steps_done" in shapes:
        return []
    return [
        f"the optimiser state is not of this model: unknown {unknown[:3]}, missing {missing[:3]}, "
        f"of another shape {misshapen[:3]}{'' if 'steps_done' in shapes else ', no steps_done'}"
    ]


def _by_parameter(state: Mapping[str, T]) -> dict[str, dict[str, T]]:
    moments: dict[str, dict[str, T]] = defaultdict(dict)
    for path, value in state.items():
        key, _, name = path.partition(".")
        if name:
            moments[name][key] = value
    return moments
