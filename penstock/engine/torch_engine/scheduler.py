"""Which requests run, and one engine step: admit, compute prompts, one token for each running answer, end the finished.

Lives in the engine's thread; nothing here waits. Running answers occupy the first slots without gaps: when one ends,
the last moves into its place, so a step computes the live rows and no others. In deterministic mode rows never move and
every slot is computed at every step, so the shapes that reach the kernels do not depend on the neighbours.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch

from penstock.engine.torch_engine.cache import SlotCache, round_up
from penstock.engine.torch_engine.model import LanguageModel
from penstock.engine.torch_engine.prefix import Prefixes
from penstock.engine.torch_engine.row import Row
from penstock.engine.torch_engine.sampling import sample
from penstock.engine.torch_engine.scratch import Scratch
from penstock.engine.torch_engine.slots import Slots, indices
from penstock.errors import InfrastructureFailure
from penstock.ports import Completion, WeightSource
from penstock.rollout import FailureReason, FinishReason

Outcome = Completion | InfrastructureFailure
Finish = Callable[[Row, Outcome], None]
End = FinishReason | InfrastructureFailure
Watch = Callable[[str, float, float], None]
"""Told of every stage of a step: its name, when it began and when it ended, by `time.perf_counter`."""


class Scheduler:
    """`finish` is called with every request that ends, in the thread that calls `step` or `end`."""

    def __init__(
        self,
        model: LanguageModel,
        finish: Finish,
        *,
        max_running: int,
        max_context: int,
        prefill_chunk_tokens: int,
        stop_ids: Iterable[int],
        deterministic: bool,
    ) -> None:
        self._model = model
        self._finish = finish
        self._max_running = max_running
        self._max_context = max_context
        self._chunk = prefill_chunk_tokens
        self._deterministic = deterministic
        # Whole vectors of rows: elementwise kernels treat a ragged end with other instructions, so other bits.
        self._slots = Slots(round_up(max_running) if deterministic else max_running)
        self._stops = np.zeros(model.vocab_size, bool)
        self._stops[[token for token in stop_ids if token < model.vocab_size]] = True
        self.cache = SlotCache(model.cache_layers, model.dtype, model.device)
        self.prefixes = Prefixes(model.cache_layers, model.dtype, model.device)
        self.waiting: deque[Row] = deque()
        self._filling: list[Row] = []
        """Admitted, their prefix not computed yet."""
        self._scratch = Scratch(model.device)
        self.model_step = 0
        self.generated_tokens = 0
        self.watch: Watch | None = None

    @property
    def running(self) -> int:
        return self._slots.count + len(self._filling)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self._filling or self._slots.active.any())

    @property
    def cache_use(self) -> float:
        room = self.cache.slots * self.cache.length
        return float(self._slots.position[self._slots.active].sum()) / room if room else 0.0

    def add(self, row: Row) -> None:
        self.prefixes.want(row.prefix_key)
        self.waiting.append(row)

    def load_weights(self, source: WeightSource, model_step: int) -> None:
        """Replace the weights. Running answers keep the keys and values they have; prefixes are computed anew."""
        began = time.perf_counter()
        self._model.load(source)
        self._tell("load weights", began)
        for slot in self._live():
            self._row(slot).close_run(self.model_step, int(self._slots.made[slot]))
        self.model_step = model_step
        self.prefixes.forget()
        for row in self._filling:
            self.prefixes.start(row.prefix_key)

    def end(self, chosen: Callable[[Row], bool]) -> None:
        """End the chosen requests with ABORT and the tokens they have."""
        for row in [row for row in self.waiting if chosen(row)]:
            self.waiting.remove(row)
            self._end_before_start(row)
        for row in [row for row in self._filling if chosen(row)]:
            self._filling.remove(row)
            self._end_before_start(row)
        self._end_slots({slot: FinishReason.ABORT for slot in self._live() if chosen(self._row(slot))})

    def step(self) -> None:
        self._admit()
        self._prefill()
        self._seat()
        if self._slots.active.any():
            self._decode()

    def _admit(self) -> None:
        while self.waiting and self.running < self._max_running:
            row = self.waiting.popleft()
            if row.prefix_key and self._sibling(row) is None:
                self.prefixes.start(row.prefix_key)
            self._filling.append(row)

    def _prefill(self) -> None:
        spent = 0
        while spent < self._chunk:
            budget = self._chunk if self._deterministic else self._chunk - spent
            parts = self.prefixes.next_parts(budget, alone=self._deterministic)
            if not parts:
                return
            began = time.perf_counter()
            self._model.prefill(parts)
            self._tell("prefill", began)
            spent += sum(count for _, count in parts)

    def _seat(self) -> None:
        """Give a slot to every admitted request whose prefix is there."""
        still = []
        for row in self._filling:
            prefix = self.prefixes.get(row.prefix_key)
            sibling = self._sibling(row)
            if row.prefix_key and sibling is None and not (prefix is not None and prefix.ready):
                self.prefixes.start(row.prefix_key)  # The sibling it was to be copied from may have ended.
                still.append(row)
                continue
            slot = indices(~self._slots.active)[0]
            self._reserve(slot + 1, len(row.context))
            if prefix is not None and prefix.ready:
                self.cache.place(prefix, slot)
            elif sibling is not None:
                self.cache.copy(sibling, slot, len(row.context) - 1)
            row.prefix_step = self.model_step
            self._slots.put(slot, row)
            self.prefixes.unwant(row.prefix_key)
        self._filling = still

    def _sibling(self, row: Row) -> int | None:
        """The slot of a running answer to the same prompt, prefilled under the current weights."""
        if not row.prefix_key:
            return None
        for slot in self._live():
            other = self._row(slot)
            if other.prefix_step == self.model_step and other.prefix_key == row.prefix_key:
                return slot
        return None

    def _decode(self) -> None:
        slots = self._slots
        n = len(slots.rows) if self._deterministic else slots.count
        length = round_up(int(slots.position[:n].max()) + 1)
        self._reserve(n, length)
        device = self._model.device
        ids = torch.from_numpy(slots.last_token[:n]).to(device)
        positions = torch.from_numpy(slots.position[:n]).to(device)
        began = time.perf_counter()
        logits = self._model.decode(ids, positions, self.cache, length)
        decoded = self._tell("decode", began)
        tokens, logprobs = sample(logits, slots.how_to_sample(n), self._scratch)
        self._tell("sample", decoded)
        slots.append(n, tokens, logprobs)
        self.generated_tokens += slots.count
        ends: dict[int, End] = dict(self._ended(n, tokens))
        for slot in indices(slots.active[:n] & ~np.isfinite(logprobs)):
            ends[slot] = InfrastructureFailure(
                f"request {self._row(slot).request.request_id}: the logits are not finite at model step "
                f"{self.model_step}; the weights are broken",
                reason=FailureReason.LOGITS_NOT_FINITE,
            )
        self._end_slots(ends)
        if any(isinstance(end, InfrastructureFailure) for end in ends.values()):
            # A NaN left behind a row's end would reach it: probability 0 times NaN is NaN.
            for slot in range(self.cache.slots):
                self.cache.wipe(slot, int(slots.position[slot]))

    def _ended(self, n: int, tokens: np.ndarray) -> list[tuple[int, FinishReason]]:
        slots = self._slots
        stopped = slots.active[:n] & self._stops[tokens]
        for slot in indices(slots.active[:n] & slots.own_stops[:n]):
            row, token = self._row(slot), int(tokens[slot])
            text_ends = row.stop_text is not None and row.stop_text.ends_with(token)
            stopped[slot] |= token in row.stop_ids or (text_ends and slots.made[slot] >= slots.min_new[slot])
        full = slots.active[:n] & (slots.made[:n] >= slots.budget[:n])
        return [(slot, FinishReason.STOP if stopped[slot] else FinishReason.LENGTH) for slot in indices(stopped | full)]

    def _end_slots(self, ends: dict[int, End]) -> None:
        for slot, end in ends.items():
            row = self._row(slot)
            row.close_run(self.model_step, int(self._slots.made[slot]))
            if isinstance(end, InfrastructureFailure):
                self._finish(row, end)
            else:
                self._finish(row, row.completion(*self._slots.tokens(slot), end))
        for slot in sorted(ends, reverse=True):
            self._vacate(slot)

    def _vacate(self, slot: int) -> None:
        last = self._slots.count - 1
        if self._deterministic or slot == last:
            self._slots.clear(slot)
        else:
            self.cache.copy(last, slot, int(self._slots.position[last]))
            self._slots.move(last, slot)

    def _end_before_start(self, row: Row) -> None:
        self.prefixes.unwant(row.prefix_key)
        self._finish(row, row.completion(b"", b"", FinishReason.ABORT))

    def _reserve(self, slots: int, length: int) -> None:
        count = len(self._slots.rows)
        self.cache.reserve(
            count if self._deterministic else slots, length, max_slots=count, max_length=self._max_context
        )

    def _tell(self, stage: str, began: float) -> float:
        ended = time.perf_counter()
        if self.watch is not None:
            self.watch(stage, began, ended)
        return ended

    def _live(self) -> list[int]:
        return indices(self._slots.active)

    def _row(self, slot: int) -> Row:
        row = self._slots.rows[slot]
        assert row is not None
        return row
