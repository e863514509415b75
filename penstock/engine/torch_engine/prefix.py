"""Prompts that are computed once and shared: siblings of a group ask the same prompt.

A prompt's last token is not part of its prefix. It goes through the decode step like every later token, so logits are
made in one place, and a prefix serves K answers by being copied into K slots.
"""

from __future__ import annotations

from collections import Counter

import torch

from penstock.engine.torch_engine.cache import LayerShape, Prefix


class Prefixes:
    """The prefixes that waiting requests need, kept while one of them still waits."""

    def __init__(self, layers: list[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self._layers, self._dtype, self._device = layers, dtype, device
        self._wanted: Counter[bytes] = Counter()
        self._kept: dict[bytes, Prefix] = {}
        self.computed = 0
        """How many prefixes were computed since the engine started."""

    def want(self, key: bytes) -> None:
        self._wanted[key] += 1

    def unwant(self, key: bytes) -> None:
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]
            self._kept.pop(key, None)

    def get(self, key: bytes) -> Prefix | None:
        return self._kept.get(key)

    def start(self, key: bytes) -> None:
        """Begin to compute this prefix, unless it has begun."""
        if key not in self._kept:
            ids = torch.frombuffer(bytearray(key), dtype=torch.int32).to(self._device, torch.long)
            self._kept[key] = Prefix(ids, self._layers, self._dtype)
            self.computed += 1

    def forget(self) -> None:
        """Drop all that was computed: the weights changed."""
        self._kept.clear()

    def next_parts(self, budget: int, *, alone: bool) -> list[tuple[Prefix, int]]:
        """What to compute now, oldest first: (prefix, tokens) worth at most `budget`.

        `alone`: one part, whose size depends on its own prefix only.
        """
        parts: list[tuple[Prefix, int]] = []
        for prefix in self._kept.values():
            left = len(prefix.ids) - prefix.done
            if left and budget:
                parts.append((prefix, min(left, budget)))
                if alone:
                    break
                budget -= min(left, budget)
        return parts
