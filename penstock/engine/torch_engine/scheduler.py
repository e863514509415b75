"""Which requests run, and one engine step: admit, compute prompts, one token for each running answer, end the finished.

Lives in the engine's thread; nothing here waits. Running answers occupy the first slots without gaps: when one ends,
the last moves into its place, so a step computes the live rows and no others. In deterministic mode rows never move and
every slot is computed at every step, so the shapes that reach the kernels do not depend on the neighbours.

A pause takes frozen answers out of their slots, keys and values and all, so that served ones have room; they are put
back when they may go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.engine.torch_engine.cache import Prefix, SlotCache, round_up
from penstock.engine.torch_engine.model import LanguageModel
from penstock.engine.torch_engine.prefix import Prefixes
from penstock.engine.torch_engine.row import Row
from penstock.engine.torch_engine.sampling import sample
from penstock.engine.torch_engine.scoring import Scoring
from penstock.engine.torch_engine.scratch import Scratch
from penstock.engine.torch_engine.slots import SavedColumns, Slots, indices
from penstock.errors import InfrastructureFailure
from penstock.models.kernels import kernels
from penstock.ports import Completion, WeightSource
from penstock.rollout import FailureReason, FinishReason

Outcome = Completion | bytes | InfrastructureFailure
Finish = Callable[[Row | Scoring, Outcome], None]
End = FinishReason | InfrastructureFailure
Watch = Callable[[str, float, float], None]
"""Told of every stage of a step: its name, when it began and when it ended, by `time.perf_counter`."""


class Frozen(NamedTuple):
    """An answer that was taken out of its slot."""

    row: Row
    columns: SavedColumns
    cache: list[Tensor]
    length: int
    tokens: tuple[bytes, bytes]


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
        self.prefixes = Prefixes(
            model.cache_layers,
            model.dtype,
            model.device,
            share_beginnings=not deterministic,  # else bits would depend on who else asks
        )
        self.waiting: deque[Row] = deque()
        self._filling: list[Row] = []
        """Admitted, their prefix not computed yet."""
        self._frozen: list[Frozen] = []
        self._scoring: deque[Scoring] = deque()
        self._may_run: Callable[[Row | Scoring], bool] | None = None
        """Which requests go on; None: all."""
        self._streams = 0
        """How many requests want their tokens as they are made."""
        self._scratch = Scratch(model.device)
        self._kernels = kernels() if model.device.type == "cpu" and not deterministic else None
        self.model_step = 0
        self.generated_tokens = 0
        self.watch: Watch | None = None
        self.decoded: tuple[float, int] | None = None
        """Of the last step: the seconds it took to decode, and how many rows; None where none was decoded."""

    @property
    def running(self) -> int:
        return self._slots.count + len(self._filling)

    @property
    def not_running(self) -> int:
        """Requests that wait for a slot, were frozen, or are to be scored."""
        return len(self.waiting) + len(self._frozen) + len(self._scoring)

    @property
    def has_work(self) -> bool:
        """Something that may go on."""
        if self._filling or self._slots.active.any():
            return True
        may_run = self._may_run
        if may_run is None:
            return bool(self.waiting or self._frozen or self._scoring)
        return any(map(may_run, self._all_waiting()))

    @property
    def cache_use(self) -> float:
        room = self.cache.slots * self.cache.length
        return float(self._slots.position[self._slots.active].sum()) / room if room else 0.0

    def add(self, request: Row | Scoring) -> None:
        if isinstance(request, Scoring):
            self._scoring.append(request)
            return
        self.prefixes.want(request.prefix_key)
        self.waiting.append(request)
        self._streams += request.pieces is not None

    def pause(self) -> None:
        """From here on only served requests go on: those that a pause aborts end, those that are kept are frozen."""
        self.end(lambda request: request.on_pause == "abort")
        kept = [row for row in self._filling if row.on_pause == "keep"]
        self._filling = [row for row in self._filling if row.on_pause != "keep"]
        self.waiting.extendleft(reversed(kept))
        for slot in reversed([slot for slot in self._live() if self._row(slot).on_pause == "keep"]):
            self._frozen.append(self._freeze(slot))
        self._may_run = lambda request: request.on_pause == "serve"

    def finish_what_is_here(self) -> None:
        """Frozen requests go on too, but none that comes later."""
        here = {*self._all_waiting(), *self._filling}
        self._may_run = lambda request: request in here

    def resume(self) -> None:
        self._may_run = None

    def _freeze(self, slot: int) -> Frozen:
        row, position = self._row(slot), int(self._slots.position[slot])
        row.close_run(self.model_step, int(self._slots.made[slot]))
        frozen = Frozen(
            row,
            self._slots.copy_out(slot),
            self.cache.copy_out(slot, position),
            position + 1,
            self._slots.tokens(slot),
        )
        self._vacate(slot)
        return frozen

    def _thaw(self) -> None:
        """Put frozen answers that may go on back into slots."""
        for frozen in list(self._frozen):
            if self.running >= self._max_running:
                return
            if self._may_run is None or self._may_run(frozen.row):
                self._frozen.remove(frozen)
                slot = indices(~self._slots.active)[0]
                self._reserve(slot + 1, frozen.length)
                self.cache.put_back(slot, frozen.cache)
                self._slots.put_back(slot, frozen.row, frozen.columns)

    def _all_waiting(self) -> Iterator[Row | Scoring]:
        yield from self.waiting
        yield from (frozen.row for frozen in self._frozen)
        yield from self._scoring

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
        for scoring in self._scoring:
            scoring.start_over()

    def drop(self, request: Row | Scoring) -> None:
        """Nobody waits for it any more."""
        if isinstance(request, Scoring):
            self._scoring = deque(other for other in self._scoring if other is not request)
        else:
            self.end(lambda other: other is request)

    def end(self, chosen: Callable[[Row], bool]) -> None:
        """End the chosen requests with ABORT and the tokens they have."""
        for frozen in [frozen for frozen in self._frozen if chosen(frozen.row)]:
            self._frozen.remove(frozen)
            self._ended_with(frozen.row, frozen.row.completion(*frozen.tokens, FinishReason.ABORT))
        for row in [row for row in self.waiting if chosen(row)]:
            self.waiting.remove(row)
            self._end_before_start(row)
        for row in [row for row in self._filling if chosen(row)]:
            self._filling.remove(row)
            self._end_before_start(row)
        self._end_slots({slot: FinishReason.ABORT for slot in self._live() if chosen(self._row(slot))})

    def step(self) -> None:
        self.decoded = None
        if self._scoring:
            self._score()
        if self._frozen:
            self._thaw()
        self._admit()
        self._prefill()
        self._seat()
        if self._slots.active.any():
            self._decode()

    def _admit(self) -> None:
        while self.waiting and self.running < self._max_running:
            row = self._next_waiting()
            if row is None:
                return
            if row.prefix_key and self._sibling(row) is None:
                self.prefixes.start(row.prefix_key)
            self._filling.append(row)

    def _next_waiting(self) -> Row | None:
        if self._may_run is None:
            return self.waiting.popleft()
        row = next(filter(self._may_run, self.waiting), None)
        if row is not None:
            self.waiting.remove(row)
        return row

    def _score(self) -> None:
        """One part of the oldest that may be scored now."""
        scoring = next((each for each in self._scoring if self._may_run is None or self._may_run(each)), None)
        if scoring is None:
            return
        began = time.perf_counter()
        outcome = scoring.advance(self._model)
        self._tell("score", began)
        if outcome is not None:
            self._scoring.remove(scoring)
            self._finish(scoring, outcome)

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
        ready: dict[Prefix, list[int]] = {}
        """Slots that begin with a prefix; all of them are filled at once."""
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
                ready.setdefault(prefix, []).append(slot)
            elif sibling is not None:
                self._place(ready)
                self.cache.copy(sibling, slot, len(row.context) - 1)
            row.prefix_step = self.model_step
            self._slots.put(slot, row)
            self.prefixes.unwant(row.prefix_key)
        self._place(ready)
        self._filling = still

    def _place(self, ready: dict[Prefix, list[int]]) -> None:
        while ready:
            self.cache.place(*ready.popitem())

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
        self.decoded = (decoded - began, n)
        tokens, logprobs = sample(logits, slots.how_to_sample(n), self._scratch, self._kernels)
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
        if self._streams:
            self._send_pieces()
        if any(isinstance(end, InfrastructureFailure) for end in ends.values()):
            # A NaN left behind a row's end would reach it: probability 0 times NaN is NaN.
            for slot in range(self.cache.slots):
                self.cache.wipe(slot, int(slots.position[slot]))

    def _send_pieces(self) -> None:
        for slot in self._live():
            row, made = self._row(slot), int(self._slots.made[slot])
            if row.pieces is not None and made > row.sent:
                ids, logprobs = self._slots.tokens(slot, row.sent)
                steps = ((self.model_step, made - row.sent),)
                row.sent = made
                self._finish(row, Completion(ids=ids, logprobs=logprobs, finish_reason=None, steps=steps))

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
                self._ended_with(row, end)
            else:
                self._ended_with(row, row.completion(*self._slots.tokens(slot), end))
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
        self._ended_with(row, row.completion(b"", b"", FinishReason.ABORT))

    def _ended_with(self, row: Row, outcome: Outcome) -> None:
        self._streams -= row.pieces is not None
        self._finish(row, outcome)

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
