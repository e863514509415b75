"""Weights sharded over ranks by FSDP2: each rank holds some rows of every tensor, of its gradient and of its moments.

A layer's weights are gathered for as long as it computes. Its gradient is added up over the ranks, not averaged: what
a token counts in the loss is known to be of the whole batch before it is computed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from penstock.learn.recompute import outermost_layers


def shard(module: Any, model: Any, mesh: Any) -> None:
    """`module` is all of the forward pass, with `model` in it; its layers are gathered one by one."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for layer in outermost_layers(model).values():
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # A factor of one by multiplying is an operation that gloo does not have.
            part.set_force_sum_reduction_for_comms(True)


def gathered(tensor: Tensor) -> Tensor:
    """All rows of a tensor. Of a sharded one every rank must ask, in the same order."""
    whole: Tensor = tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def own(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, as a view; all of a tensor that is not sharded."""
    held: Tensor = tensor.to_local() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return held


def own_rows(tensor: Any) -> slice:
    """Which rows of the whole those are."""
    if not _is_sharded(tensor):
        return slice(0, tensor.shape[0] if tensor.dim() else 1)
    mesh = tensor.device_mesh
    most = -(-tensor.shape[0] // mesh.size())
    start = min(tensor.shape[0], mesh.get_local_rank() * most)
    rows = slice(start, min(tensor.shape[0], start + most))
    assert rows.stop - rows.start == tensor.to_local().shape[0], "torch shards by other rows"
    return rows


def _is_sharded(tensor: Tensor) -> bool:
    if type(tensor) in (Tensor, Parameter):
        return False
    # Only where it is needed: it takes as long to import as all the rest of torch.
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
