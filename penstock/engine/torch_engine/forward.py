"""Fused forward of the Llama and Qwen families: one matrix for q, k and v, one for gate and up, the cache in place.

Matrices lie as Hugging Face has them (out x in), those that share an input below each other: new weights are copied
without being turned. Every call takes a flat list of tokens; who they belong to matters to attention alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.torch_engine.attention import (
    DecodeAttention,
    attend_in_blocks,
    attend_prompt,
    decode_mask,
    faster_attention,
)
from penstock.engine.torch_engine.cache import LayerShape, Prefix, SlotCache, round_up
from penstock.engine.torch_engine.lanes import Lanes
from penstock.engine.torch_engine.products import Products, choose_products, packed_where_faster
from penstock.engine.torch_engine.sampling import target_logprobs
from penstock.engine.torch_engine.scratch import Scratch
from penstock.engine.torch_engine.weights import EngineWeights
from penstock.models.families import EMBEDDING, HEAD, head_dim, is_tied, rotary_frequencies
from penstock.models.rounding import rounded
from penstock.ports import WeightSource

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """2 x d: the weight of the q norm, that of the k norm."""
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class FusedModel:
    """The engine's own copy of a model's weights, in its own layout and dtype."""

    def __init__(
        self,
        config: Any,
        state: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool,
        packed: bool | None = None,
    ) -> None:
        """`config` is that of transformers, `state` the weights by their names there."""
        self.vocab_size: int = config.vocab_size
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = head_dim(config)
        self._products: Products = choose_products(dtype, device, deterministic=deterministic)
        self.dtype, self.device = dtype, device
        layer = LayerShape(self.kv_heads, self.head_dim, self.head_dim)
        self._attend: DecodeAttention = attend_in_blocks
        if not deterministic:
            self._attend, layer = faster_attention(layer, self.heads // self.kv_heads, dtype, device)
        self.cache_layers = [layer] * config.num_hidden_layers
        self._deterministic = deterministic
        self._logits = Scratch(device)
        self.lanes = Lanes()
        self._eps: float = config.rms_norm_eps
        frequencies, self._rope_factor = rotary_frequencies(config)
        self._frequencies = frequencies.to(device)
        self._rope = self._rope_table(0)
        self._norm_of_head = torch.tensor([0] * self.heads + [1] * self.kv_heads, device=device)
        tied = is_tied(config, state)
        self._weights = EngineWeights(optional=frozenset({HEAD} if tied else ()))
        self._embedding = self._own(EMBEDDING, state)
        self._norm = self._own("model.norm.weight", state)
        self._head = self._embedding if tied else self._own(HEAD, state)
        self._layers = [self._own_layer(index, state) for index in range(config.num_hidden_layers)]
        self._products = packed_where_faster(self._products, self._matrices, packed=packed, deterministic=deterministic)

    @property
    def _matrices(self) -> list[Tensor]:
        layers = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in self._layers]
        return [*itertools.chain(*layers), self._head]

    def load(self, source: WeightSource) -> None:
        self._weights.load(source)
        self._products.adopt(self._matrices)

    def prefill(self, parts: list[tuple[Prefix, int]]) -> None:
        """Compute the next tokens of each prefix: as many as its number says."""
        self._prefill(parts)

    def score(self, prefix: Prefix, targets: Tensor) -> Tensor:
        """Compute as many tokens of the prefix as there are targets; the logprob of each target after its token."""
        hidden = self._prefill([(prefix, len(targets))])[: len(targets)]
        logits = self._logits.take(len(targets), len(self._head))
        self._products.head(self._normed(hidden, self._norm), self._head, logits)
        return target_logprobs(logits, targets)

    def _prefill(self, parts: list[tuple[Prefix, int]]) -> Tensor:
        """The hidden states of what was computed."""
        ids, positions, spans = [], [], []
        offset = 0
        for prefix, count in parts:
            # Deterministic: a length of few values; causal attention keeps the padding out of what counts.
            width = round_up(count) if self._deterministic else count
            chunk = prefix.ids[prefix.done : prefix.done + count]
            ids.append(F.pad(chunk, (0, width - count)))
            positions.append(torch.arange(prefix.done, prefix.done + width, device=self.device))
            spans.append((prefix, prefix.done, offset, width))
            offset += width

        def attend_parts(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            outs = []
            for prefix, start, at, width in spans:
                keys, values = prefix.keys[layer][:, : start + width], prefix.values[layer][:, : start + width]
                keys[:, start:] = key[at : at + width].transpose(0, 1)
                values[:, start:] = value[at : at + width].transpose(0, 1)
                outs.append(attend_prompt(query[at : at + width], keys, values, start))
            return torch.cat(outs) if len(outs) > 1 else outs[0]

        hidden = self._run(torch.cat(ids), torch.cat(positions), attend_parts)
        for prefix, count in parts:
            prefix.done += count
        return hidden

    def decode(self, ids: Tensor, positions: Tensor, cache: SlotCache, length: int) -> Tensor:
        """One token for each of the first n slots, at its position; logits in float32, valid until the next call.
        Reads `length` of the cache."""
        logits = self._logits.take(len(ids), len(self._head))
        self._rope_at(positions)  # The table is long enough before several read it.

        def decode_rows(part: slice) -> None:
            self._decode_rows(ids[part], positions[part], cache, length, part, logits[part])

        self.lanes.run(decode_rows, self.lanes.parts(len(ids)))
        return logits

    def _decode_rows(
        self, ids: Tensor, positions: Tensor, cache: SlotCache, length: int, slots: slice, logits: Tensor
    ) -> None:
        n = len(ids)
        rows = torch.arange(n, device=self.device)
        mask = decode_mask(positions, length, torch.float32 if self._deterministic else self.dtype)

        def attend_slots(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.keys[layer][slots], cache.values[layer][slots]
            keys[rows, :, positions] = key
            values[rows, :, positions] = value
            folded = query.reshape(n, self.kv_heads, -1, self.head_dim)
            return self._attend(folded, keys[:, :, :length], values[:, :, :length], mask)

        hidden = self._run(ids, positions, attend_slots)
        self._products.head(self._normed(hidden, self._norm), self._head, logits)

    def _run(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        cos, sin = self._rope_at(positions)
        tokens, heads, both = len(ids), self.heads, self.heads + self.kv_heads
        half = self.head_dim // 2
        products = self._products
        hidden = self._embedding[ids].to(products.dtype)
        for index, layer in enumerate(self._layers):
            x = self._normed(hidden, layer.input_norm)
            qkv = products.apply(x, layer.qkv, layer.qkv_bias).view(tokens, -1, self.head_dim)
            qk = qkv[:, :both]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (self.head_dim,), None, self._eps) * layer.qk_norm[self._norm_of_head]
            # sin carries the sign of rotate_half, so the rotation is a roll.
            qk = torch.addcmul(qk * cos, qk.roll(half, -1), sin).to(self.dtype)
            value = qkv[:, both:].to(self.dtype)
            attended = attend(index, qk[:, :heads], qk[:, heads:], value).reshape(tokens, -1)
            products.add(hidden, attended, layer.out, layer.out_bias)
            x = self._normed(hidden, layer.mlp_norm)
            gate, up = products.apply(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            products.add(hidden, F.silu(gate).mul_(up), layer.down, layer.down_bias)
        return hidden

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._eps)

    def _rope_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        last = int(positions.max())
        if last >= len(self._rope[0]):
            self._rope = self._rope_table(max(2 * len(self._rope[0]), round_up(last + 1)))
        cos, sin = self._rope
        return cos[positions], sin[positions]

    def _rope_table(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin for each position: length x 1 x d."""
        angles = torch.arange(length, device=self.device, dtype=torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        dtype = self._products.dtype
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def _own(self, name: str, state: dict[str, Tensor]) -> Tensor:
        """A matrix in the dtype of matrices, anything smaller in that of the hidden states it is multiplied with."""
        dtype = self.dtype if state[name].dim() == 2 else self._products.dtype
        return self._one_block([name], state, dtype)

    def _own_layer(self, index: int, state: dict[str, Tensor]) -> Layer:
        at = f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."
        qkv, qkv_bias = self._join([attention + f"{part}_proj" for part in "qkv"], state)
        gate_up, gate_up_bias = self._join([mlp + "gate_proj", mlp + "up_proj"], state)
        out, out_bias = self._join([attention + "o_proj"], state)
        down, down_bias = self._join([mlp + "down_proj"], state)
        return Layer(
            input_norm=self._own(at + "input_layernorm.weight", state),
            qkv=qkv,
            qkv_bias=qkv_bias,
            qk_norm=self._own_qk_norm(attention, state),
            out=out,
            out_bias=out_bias,
            mlp_norm=self._own(at + "post_attention_layernorm.weight", state),
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=down,
            down_bias=down_bias,
        )

    def _join(self, names: list[str], state: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The named linear layers below each other.

        One part alone may lack a bias (Qwen2 has none on the output projection), a part of several may not.
        """
        joined = self._one_block([name + ".weight" for name in names], state, self.dtype)
        if names[0] + ".bias" not in state:
            return joined, None
        return joined, self._one_block([name + ".bias" for name in names], state, self._products.dtype)

    def _own_qk_norm(self, attention: str, state: dict[str, Tensor]) -> Tensor | None:
        if attention + "q_norm.weight" not in state:
            return None
        names = [attention + "q_norm.weight", attention + "k_norm.weight"]
        return self._one_block(names, state, self._products.dtype, shape=(2, self.head_dim))

    def _one_block(
        self, names: list[str], state: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        block = torch.cat([rounded(state[name].detach(), dtype) for name in names]).to(self.device)
        block = block.view(shape) if shape is not None else block
        self._weights.add(block, {name: state[name].shape for name in names})
        return block
