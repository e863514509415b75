"""Any transformers causal LM through its own forward, over our slot cache.

The model sees a cache of `length` tokens to which it adds one; in truth each row's new key is written at that row's own
position and the padding mask hides what lies behind it. Positions are given, or follow from the mask where a model
counts them itself.

Not for models with recurrent state, which have no slots to share. A sliding window limits the context to its size:
the models measure it from the end of the cache, not from each row's own position.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.masking_utils import sdpa_mask

from penstock.engine.torch_engine.attention import UnknownAttention, block_attention
from penstock.engine.torch_engine.cache import LayerShape, Prefix, SlotCache, round_up
from penstock.engine.torch_engine.sampling import target_logprobs
from penstock.engine.torch_engine.weights import EngineWeights
from penstock.errors import ModelError
from penstock.models.rounding import rounded
from penstock.ports import WeightSource

_BLOCKS = "penstock_blocks"
_NOT_DETERMINISTIC = "its answers cannot be made independent of their neighbours. Set deterministic=False."


class GenericModel:
    """A transformers model of the engine's own, in its own dtype."""

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device, *, deterministic: bool) -> None:
        self._model = model.to(device).eval().requires_grad_(False)
        self.dtype, self.device = dtype, device
        text_config = model.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self._deterministic = deterministic
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._last_position = getattr(text_config, "max_position_embeddings", 1 << 30) - 1
        places = dict(model.named_parameters()) | {
            name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()
        }
        # What is no weight, such as rotary frequencies, is computed in the precision it has.
        for place in places.values():
            if place.is_floating_point():
                place.data = rounded(place.data, dtype)
        self.cache_layers = self._probe_cache()
        if deterministic:
            self._use_block_attention()
        self._weights = EngineWeights(optional=frozenset(model.state_dict().keys() - places.keys()))
        for name, place in places.items():
            self._weights.add(place, {name: place.shape})

    def load(self, source: WeightSource) -> None:
        self._weights.load(source)

    def prefill(self, parts: list[tuple[Prefix, int]]) -> None:
        for prefix, count in parts:
            self._prefill(prefix, count, **self._extra)

    def score(self, prefix: Prefix, targets: Tensor) -> Tensor:
        """Compute as many tokens of the prefix as there are targets; the logprob of each target after its token."""
        logits = self._prefill(prefix, len(targets))[0, : len(targets)]
        return target_logprobs(logits.float(), targets)

    def _prefill(self, prefix: Prefix, count: int, **extra: Any) -> Tensor:
        width = round_up(count) if self._deterministic else count
        ids = F.pad(prefix.ids[prefix.done : prefix.done + count], (0, width - count))
        positions = torch.arange(prefix.done, prefix.done + width, device=self.device)
        layers: list[Any] = [
            _PrefixLayer(keys[None], values[None], prefix.done)
            for keys, values in zip(prefix.keys, prefix.values, strict=True)
        ]
        mask = torch.ones(1, prefix.done + width, dtype=torch.long, device=self.device)
        logits = self._call(ids[None], positions[None], mask, Cache(layers=layers), **extra)
        prefix.done += count
        return logits

    def decode(self, ids: Tensor, positions: Tensor, cache: SlotCache, length: int) -> Tensor:
        """One token for each of the first n slots, at its position; logits in float32. Reads `length` of the cache."""
        layers: list[Any] = [
            _SlotLayer(keys, values, positions, length) for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        mask = (torch.arange(length, device=self.device) <= positions[:, None]).long()
        logits = self._call(ids[:, None], positions[:, None], mask, Cache(layers=layers), **self._extra)
        return logits[:, -1].float()

    def _call(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Cache, **extra: Any) -> Tensor:
        # Padding behind a prompt may lie behind the last position the model has.
        given = {"position_ids": positions.clamp(max=self._last_position)} if self._takes_positions else {}
        output = self._model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **given, **extra
        )
        logits: Tensor = output.logits
        return logits

    def _probe_cache(self) -> list[LayerShape]:
        """One token through the model: the shapes it caches, whatever its configuration calls them."""
        cache = DynamicCache(config=self._model.config)
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self._model(input_ids=ids, past_key_values=cache, use_cache=True, **self._extra)
        shapes = []
        for layer in cache.layers:
            if getattr(layer, "keys", None) is None or getattr(layer, "values", None) is None:
                raise ModelError(
                    f"{type(self._model).__name__} keeps more than keys and values between tokens; "
                    "the embedded engine cannot serve it. Use the vLLM engine."
                )
            shapes.append(LayerShape(layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1]))
        if not shapes:
            raise ModelError(f"{type(self._model).__name__} uses no key-value cache; use the vLLM engine.")
        return shapes

    def _use_block_attention(self) -> None:
        """Replace the model's attention by one whose sums do not depend on the neighbours."""
        if not getattr(self._model, "_supports_attention_backend", False):
            raise ModelError(
                f"{type(self._model).__name__} does not let its attention be replaced; {_NOT_DETERMINISTIC}"
            )
        AttentionInterface.register(_BLOCKS, block_attention)
        AttentionMaskInterface.register(_BLOCKS, sdpa_mask)
        self._model.set_attn_implementation(_BLOCKS)
        try:
            with torch.inference_mode():
                self._model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=self.device))
        except UnknownAttention as error:
            raise ModelError(f"{type(self._model).__name__} {error}; {_NOT_DETERMINISTIC}") from error


class _OurLayer(CacheLayerMixin):
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class _SlotLayer(_OurLayer):
    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, length: int) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self._positions, self._length = positions, length
        self._rows = torch.arange(len(positions), device=positions.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        n = len(self._rows)
        assert self.keys is not None
        assert self.values is not None
        self.keys[self._rows, :, self._positions] = key_states[:, :, 0]
        self.values[self._rows, :, self._positions] = value_states[:, :, 0]
        return self.keys[:n, :, : self._length], self.values[:n, :, : self._length]

    def get_seq_length(self) -> int:
        return self._length - 1


class _PrefixLayer(_OurLayer):
    def __init__(self, keys: Tensor, values: Tensor, done: int) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self._done = done

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self._done + key_states.shape[2]
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, self._done : end] = key_states
        self.values[:, :, self._done : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self._done
