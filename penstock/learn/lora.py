"""LoRA through peft: small matrices beside the linear layers are trained, the layers themselves are not.

    y = W x + scale * B (A x)        A: rank x in, B: out x rank, scale = alpha / rank

B begins at 0, so that the adapted model is the base at first. A begins with numbers that depend on nothing but its
shape and place: two processes, and a run that is resumed, begin alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from penstock.config import Config
from penstock.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
NAME = "default"
"""Of the one adapter, as peft calls it."""


class LoRAConfig(Config):
    """Train an adapter of low rank instead of the weights. Needs the extra `lora`."""

    rank: int = Field(default=16, ge=1, le=4096)
    """Of the two small matrices beside each layer."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """The adapter's part is multiplied by alpha / rank."""
    target_modules: list[str] | str = "all-linear"
    """The linear layers that get one: the ends of their names (`["q_proj", "v_proj"]`), a regular expression for whole
    names, or `all-linear`: all but the output embedding."""
    sync: Literal["merged", "adapter"] = "merged"
    """What goes to the engines. `merged`: all weights with the adapter in them. `adapter`: the adapter alone, which the
    engine adds to the weights that it was started with."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """Of one linear layer."""

    a: Parameter
    b: Parameter
    scale: float

    def added_to(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """The layer's weights with the adapter in them."""
        from penstock.weights.adapter import adapted

        return adapted(weight, self.a.detach(), self.b.detach() * self.scale, out)


def attach(model: Any, config: LoRAConfig, model_name: str) -> None:
    """Adapters into the linear layers that are named; nothing else is trainable then.

    Raises ModelError when none is bound, ConfigError when peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        problem = f"train.lora needs peft, which cannot be imported ({error}): pip install penstock[lora]"
        raise ConfigError(problem) from error
    import torch

    targets = config.target_modules
    wanted = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model_name,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            peft.inject_adapter_in_model(_made_explicit(wanted, model), model, adapter_name=NAME)
        except ValueError as error:
            problem = f"lora.target_modules is {targets!r}: {_first_line(error)}{_linear_names(model)}"
            raise ModelError(problem) from error
    if not adapters_of(model):
        raise ModelError(f"lora.target_modules is {targets!r}, which binds no linear layer.{_linear_names(model)}")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    others = trained - {f"{name}.lora_{part}.{NAME}.weight" for name in adapters_of(model) for part in "AB"}
    head = model.get_output_embeddings()
    others |= {name for name, m in adapters_of(model).items() if m is head or type(m.base_layer) is not torch.nn.Linear}
    if others:
        raise ModelError(
            f"lora.target_modules is {targets!r}: {sorted(others)[:3]} cannot be adapted; linear layers can, but for "
            f"the output embedding.{_linear_names(model)}"
        )


def adapters_of(model: Any) -> dict[str, Any]:
    """The adapted layers by their names in the model; none without LoRA."""
    return {name: module for name, module in model.named_modules() if adapter_of(module) is not None}


def adapter_of(module: Any) -> Adapter | None:
    """Of a linear layer that has one."""
    if not hasattr(module, "lora_A") or not hasattr(module, "base_layer") or NAME not in module.lora_A:
        return None
    return Adapter(module.lora_A[NAME].weight, module.lora_B[NAME].weight, float(module.scaling[NAME]))


def base_of(module: Any) -> Any:
    """The linear layer itself, without its adapter."""
    return module.base_layer if adapter_of(module) is not None else module


def base_name(name: str) -> str:
    """A name of the adapted model's as the base has it."""
    return name.replace(".base_layer.", ".")


def adapter_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """For engines: `<layer>.lora_A` and `<layer>.lora_B`, the second with the scale in it."""
    from penstock.learn.shard import gathered

    for name, module in adapters_of(model).items():
        adapter = adapter_of(module)
        assert adapter is not None
        yield f"{name}.lora_A", gathered(adapter.a.detach())
        yield f"{name}.lora_B", gathered(adapter.b.detach()) * adapter.scale


def merged_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """All weights by their Hugging Face names, with the adapters in them; tied ones once."""
    from penstock.learn.shard import gathered
    from penstock.weights.adapter import adapted

    layers = adapters_of(model)
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or _is_of_adapter(name):
            continue
        seen.add(id(tensor))
        layer = layers.get(name.removesuffix(".base_layer.weight")) if name.endswith(".base_layer.weight") else None
        whole = gathered(tensor.detach())
        if layer is not None:
            adapter = adapter_of(layer)
            assert adapter is not None
            whole = adapted(whole, gathered(adapter.a.detach()), gathered(adapter.b.detach()) * adapter.scale)
        yield base_name(name), whole


def own_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """What is trained, and so all that a checkpoint needs."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if _is_of_adapter(name):
            yield name, tensor.detach()


def save_adapter(
    model: Any, weights: Mapping[str, Tensor], config: LoRAConfig, model_name: str, directory: Path
) -> None:
    """A directory that peft loads beside the base model; `weights` are its `own_tensors`. Raises OSError."""
    from penstock.learn.save import write_tensors

    directory.mkdir(parents=True, exist_ok=True)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_name,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(adapters_of(model)),
        "inference_mode": True,
    }
    (directory / ADAPTER_FILES[0]).write_text(json.dumps(described, indent=2) + "\n")
    tensors = {f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor for name, tensor in weights.items()}
    write_tensors(directory / ADAPTER_FILES[1], tensors)


def _is_of_adapter(name: str) -> bool:
    return name.endswith((f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"))


def _made_explicit(wanted: Any, model: Any) -> Any:
    """peft knows what all linear layers are only of a model that it wraps."""
    if wanted.target_modules != "all-linear":
        return wanted
    import torch

    head = model.get_output_embeddings()
    wanted.target_modules = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head
    }
    return wanted


def _linear_names(model: Any) -> str:
    import torch

    ends = sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
    return f" Linear layers of {type(model).__name__} end in {', '.join(ends)}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].split(". ")[0] + "."
