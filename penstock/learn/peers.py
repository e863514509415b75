"""The other ranks of a train step, as a learner sees them: they agree on numbers and add up their gradients.

Every call is made by all ranks in the same order; one that is not waits until the group's timeout and raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

BUCKET_BYTES = 64 << 20
"""Of gradients that are added up at once; so much memory is taken beside them."""


class Peers(Protocol):
    rank: int
    size: int

    @property
    def mesh(self) -> Any:
        """What weights are sharded over; None where there is nobody to share with."""
        ...

    def largest(self, *values: int) -> list[int]:
        """Of each value the largest that any rank gave."""
        ...

    def total(self, value: float) -> float: ...

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Every rank has the sum of all `.grad` then, to the bit the same. One that no rank has stays None."""
        ...

    def all_equal(self, digest: bytes) -> bool:
        """Whether every rank gave the same bytes, of the same number."""
        ...


class Alone:
    """The only rank."""

    rank, size, mesh = 0, 1, None

    def largest(self, *values: int) -> list[int]:
        return list(values)

    def total(self, value: float) -> float:
        return value

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        pass

    def all_equal(self, digest: bytes) -> bool:
        return True


class ProcessGroupPeers:
    """The ranks of the default process group of torch.distributed; `device` is what its backend can exchange."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = device
        self._mesh: Any = None

    @property
    def mesh(self) -> Any:
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            self._mesh = init_device_mesh(self._device.type, (self.size,))
        return self._mesh

    def largest(self, *values: int) -> list[int]:
        found = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def total(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(found)
        return found.item()

    def all_equal(self, digest: bytes) -> bool:
        values = list(digest)
        return self.largest(*values) == values and self.largest(*(-value for value in values)) == [-v for v in values]

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        everything = list(parameters)
        # A rank without a trained token has no gradient, and some weights may have none on any.
        somewhere = self.largest(*(parameter.grad is not None for parameter in everything))
        bucket: list[Tensor] = []
        size = 0
        for parameter, has_gradient in zip(everything, somewhere, strict=True):
            if not has_gradient:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if bucket and size + parameter.grad.nbytes > BUCKET_BYTES:
                _sum_bucket(bucket)
                bucket, size = [], 0
            bucket.append(parameter.grad)
            size += parameter.grad.nbytes
        if bucket:
            _sum_bucket(bucket)


def _sum_bucket(gradients: Sequence[Tensor]) -> None:
    if len(gradients) == 1 and gradients[0].is_contiguous():
        dist.all_reduce(gradients[0])
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
