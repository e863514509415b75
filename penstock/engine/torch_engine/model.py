"""What the scheduler asks of a model: `FusedModel` and `GenericModel` answer."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.torch_engine.cache import LayerShape, Prefix, SlotCache
from penstock.ports import WeightSource


class LanguageModel(Protocol):
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    cache_layers: list[LayerShape]

    def load(self, source: WeightSource) -> None:
        """Replace the weights, all or nothing. Raises WeightSyncError, the old ones kept."""
        ...

    def prefill(self, parts: list[tuple[Prefix, int]]) -> None:
        """Compute the next tokens of each prefix: as many as its number says."""
        ...

    def score(self, prefix: Prefix, targets: Tensor) -> Tensor:
        """Compute as many tokens of the prefix as there are targets; the logprob of each target after its token."""
        ...

    def decode(self, ids: Tensor, positions: Tensor, cache: SlotCache, length: int) -> Tensor:
        """One token for each of the first n slots, at its position; logits in float32 or bfloat16, valid until the next
        call. Reads `length` of the cache."""
        ...
