"""Fused forward of the Llama and Qwen families: one matrix for q, k and v, one for gate and up, the cache in place.

Matrices lie as Hugging Face has them (out x in), those that share an input below each other: new weights are copied
without being turned. Every call takes a flat list of tokens; who they belong to matters to attention alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.torch_engine.attention import attend_prompt
from penstock.engine.torch_engine.between import AttendSlots, Rope, Shape, choose_between
from penstock.engine.torch_engine.cache import LayerShape, Prefix, SlotCache, round_up
from penstock.engine.torch_engine.lanes import Lanes
from penstock.engine.torch_engine.products import Products, choose_products, packed_where_faster
from penstock.engine.torch_engine.sampling import target_logprobs
from penstock.engine.torch_engine.scratch import Scratch
from penstock.engine.torch_engine.weights import EngineWeights
from penstock.models.families import EMBEDDING, HEAD, head_dim, is_tied, rotary_frequencies
from penstock.models.rounding import rounded
from penstock.ports import WeightSource


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
        shape = Shape(config.num_attention_heads, config.num_key_value_heads, head_dim(config), config.rms_norm_eps)
        self._shape = shape
        self._products: Products = choose_products(dtype, device, deterministic=deterministic)
        self.dtype, self.device = dtype, device
        widths = (config.hidden_size, config.intermediate_size)
        self._between = choose_between(shape, widths, dtype, self._products.dtype, device, deterministic=deterministic)
        layer = LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim, turned=self._between.turned_keys)
        self.cache_layers = [layer] * config.num_hidden_layers
        self._deterministic = deterministic
        self._logits = Scratch(device)
        self.lanes = Lanes()
        frequencies, self._rope_factor = rotary_frequencies(config)
        self._frequencies = frequencies.to(device)
        self._rope = self._rope_table(0)
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
        return target_logprobs(self._head_of(hidden, self._logits.take(len(targets), len(self._head))), targets)

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

        at_positions = torch.cat(positions)
        rope = self._rope_up_to(int(at_positions.max())).at(at_positions)

        def attend_parts(layer: int, qkv: Tensor, qk_norm: Tensor | None) -> Tensor:
            query, key, value = self._between.rotated(qkv, qk_norm, rope)
            outs = []
            for prefix, start, at, width in spans:
                keys, values = prefix.keys[layer][:, : start + width], prefix.values[layer][:, : start + width]
                keys[:, start:] = key[at : at + width].transpose(0, 1)
                values[:, start:] = value[at : at + width].transpose(0, 1)
                outs.append(attend_prompt(query[at : at + width], keys, values, start))
            return (torch.cat(outs) if len(outs) > 1 else outs[0]).reshape(len(qkv), -1)

        hidden = self._run(torch.cat(ids), attend_parts)
        for prefix, count in parts:
            prefix.done += count
        return hidden

    def decode(self, ids: Tensor, positions: Tensor, cache: SlotCache, length: int) -> Tensor:
        """One token for each of the first n slots, at its position; logits in float32 or bfloat16, valid until the next
        call. Reads `length` of the cache."""
        room = whole = self._logits.take(len(ids), len(self._head))
        rope = self._rope_up_to(int(positions.max()))
        parts = self.lanes.parts(len(ids))

        def decode_rows(part: slice) -> None:
            nonlocal whole
            attend_slots = self._between.attention(cache, part, positions[part], rope, length)
            into = room[part]
            logits = self._head_of(self._run(ids[part], attend_slots), into)
            if len(parts) == 1:
                whole = logits
            elif logits is not into:
                into.copy_(logits)

        self.lanes.run(decode_rows, parts)
        return whole

    def _run(self, ids: Tensor, attend: AttendSlots) -> Tensor:
        between, products = self._between, self._products
        hidden, more = self._embedding[ids].to(products.dtype), None
        for index, layer in enumerate(self._layers):
            x = between.norm(hidden, more, layer.input_norm)
            qkv = products.apply(x, layer.qkv, layer.qkv_bias).view(len(ids), -1, self._shape.head_dim)
            more = products.apply(attend(index, qkv, layer.qk_norm), layer.out, layer.out_bias)
            x = between.norm(hidden, more, layer.mlp_norm)
            gate_up = products.apply(x, layer.gate_up, layer.gate_up_bias)
            more = products.apply(between.gated(gate_up), layer.down, layer.down_bias)
        return hidden if more is None else hidden.add_(more)

    def _head_of(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """`logits` is memory that may be used for them."""
        return self._products.head(self._between.norm(hidden, None, self._norm), self._head, logits)

    def _rope_up_to(self, last: int) -> Rope:
        """Of all positions up to `last` and more."""
        if last >= len(self._rope.cos):
            self._rope = self._rope_table(max(2 * len(self._rope.cos), round_up(last + 1)))
        return self._rope

    def _rope_table(self, length: int) -> Rope:
        angles = torch.arange(length, device=self.device, dtype=torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        dtype = self._products.dtype
        return Rope(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))

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
        return self._one_block(names, state, self._products.dtype, shape=(2, self._shape.head_dim))

    def _one_block(
        self, names: list[str], state: dict[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        block = torch.cat([rounded(state[name].detach(), dtype) for name in names]).to(self.device)
        block = block.view(shape) if shape is not None else block
        self._weights.add(block, {name: state[name].shape for name in names})
        return block
