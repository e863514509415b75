"""An adapter alone, and the weights that it is added to where it arrives.

A trainer of LoRA may send `<layer>.lora_A` and `<layer>.lora_B` and nothing else. The engine was started with the base,
whose files are still there: it reads them again, adds B A to each adapted layer in float32, and loads what comes of it
as any other weights. A few megabytes go over the wire, and every sync is complete: nothing drifts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from penstock.errors import WeightSyncError
from penstock.ports import WeightSource

A, B = ".lora_A", ".lora_B"


def adapted(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """weight + B A, the scale already in B: the same operation wherever it is made. One pass over what is large."""
    return torch.addmm(weight, b, a, out=out)


def on_base(source: WeightSource, model_dir: Path) -> WeightSource:
    """What an engine loads: the source as it is, or the base of `model_dir` with the adapters that it brings."""
    try:
        first = next(iter(source.tensors()), None)
    except Exception:
        # Whoever loads it meets that again, and knows what becomes of the weights that it has.
        return source
    return _OnBase(source, model_dir) if first is not None and first[0].endswith((A, B)) else source


class _OnBase:
    def __init__(self, source: WeightSource, model_dir: Path) -> None:
        self._source = source
        self._model_dir = model_dir

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises WeightSyncError for an adapter without its other half, or of a layer that the base does not have."""
        given = dict(self._source.tensors())
        layers = {name.removesuffix(A).removesuffix(B) for name in given}
        lonely = [name for name in given if not name.endswith((A, B))]
        lonely += [layer for layer in layers if layer + A not in given or layer + B not in given]
        if lonely:
            raise WeightSyncError(f"an adapter is a pair {A} and {B}; {sorted(lonely)[0]} is none")
        for name, tensor in self._base():
            layer = name.removesuffix(".weight")
            if layer in layers:
                layers.remove(layer)
                a, b = given[layer + A].float(), given[layer + B].float()
                shape = (*b.shape[:1], *a.shape[1:])
                if shape != tensor.shape:
                    raise WeightSyncError(f"the adapter of {layer} is {shape}, not {tuple(tensor.shape)}")
                tensor = adapted(tensor.float(), a, b)
            yield name, tensor
        if layers:
            raise WeightSyncError(
                f"the base in {self._model_dir} has no {sorted(layers)[0]}.weight; use lora.sync='merged'"
            )

    def _base(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for path in sorted(self._model_dir.glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                        yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"the base in {self._model_dir} cannot be read: {error}") from error
