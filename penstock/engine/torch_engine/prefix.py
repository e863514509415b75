"""Prompts that are computed once and shared: siblings of a group ask the same prompt.

A prompt's last token is not part of its prefix. It goes through the decode step like every later token, so logits are
made in one place, and a prefix serves K answers by being copied into K slots.

Prompts of different groups often begin alike, with the same instructions or tools. What a prompt shares with one that
was computed just before it, or that is about to be, is copied from there.
"""

from __future__ import annotations

from collections import Counter

import torch

from penstock.engine.torch_engine.cache import LayerShape, Prefix
from penstock.tokens import common_beginning, unpack_ids


class Prefixes:
    """The prefixes that waiting requests need, kept while one of them still waits; and the one that was ready last."""

    def __init__(
        self, layers: list[LayerShape], dtype: torch.dtype, device: torch.device, *, share_beginnings: bool
    ) -> None:
        """`share_beginnings`: a prefix may begin with what another one computed."""
        self._layers, self._dtype, self._device = layers, dtype, device
        self._share_beginnings = share_beginnings
        self._wanted: Counter[bytes] = Counter()
        self._kept: dict[bytes, Prefix] = {}
        self._last: tuple[bytes, Prefix] | None = None
        self._begins_as: dict[bytes, tuple[Prefix, int]] = {}
        """Of a prefix that waits for one that began before it: which, and how many tokens they share."""

    def want(self, key: bytes) -> None:
        self._wanted[key] += 1

    def unwant(self, key: bytes) -> None:
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]
            prefix = self._kept.pop(key, None)
            self._begins_as.pop(key, None)
            if prefix is not None and prefix.ready and self._share_beginnings:
                self._last = (key, prefix)

    def get(self, key: bytes) -> Prefix | None:
        return self._kept.get(key)

    def start(self, key: bytes) -> None:
        """Begin to compute this prefix, unless it has begun."""
        if key in self._kept:
            return
        if self._share_beginnings and (like := self._most_alike(key)) is not None:
            self._begins_as[key] = like
        ids = torch.frombuffer(bytearray(key), dtype=torch.int32).to(self._device, torch.long)
        self._kept[key] = Prefix(ids, self._layers, self._dtype)

    def forget(self) -> None:
        """Drop all that was computed: the weights changed, or the memory is given back."""
        self._kept.clear()
        self._begins_as.clear()
        self._last = None

    def next_parts(self, budget: int, *, alone: bool) -> list[tuple[Prefix, int]]:
        """What to compute now, oldest first: (prefix, tokens) worth at most `budget`.

        `alone`: one part, whose size depends on its own prefix only.
        """
        parts: list[tuple[Prefix, int]] = []
        for key, prefix in self._kept.items():
            if key in self._begins_as and not self._begun(key, prefix):
                continue
            left = len(prefix.ids) - prefix.done
            if left and budget:
                parts.append((prefix, min(left, budget)))
                if alone:
                    break
                budget -= min(left, budget)
        return parts

    def _most_alike(self, key: bytes) -> tuple[Prefix, int] | None:
        others = [*self._kept.items(), *([self._last] if self._last is not None else [])]
        ids = unpack_ids(key)
        found = [(prefix, common_beginning(ids, unpack_ids(other))) for other, prefix in others]
        like = max(found, key=lambda pair: pair[1], default=None)
        return like if like is not None and like[1] else None

    def _begun(self, key: bytes, prefix: Prefix) -> bool:
        """Whether what it shares with another is there now, or nobody computes that any more."""
        source, shared = self._begins_as[key]
        if source.done < shared and any(kept is source for kept in self._kept.values()):
            return False
        del self._begins_as[key]
        if source.done >= shared:
            prefix.begin_as(source, shared)
        return True
