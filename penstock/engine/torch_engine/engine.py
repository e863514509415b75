"""The async front of the embedded engine: one thread that steps, and an event loop that never waits for it.

Calls become commands. The thread runs the commands that arrived between two steps, in order, so every call is answered
after at most one step; with nothing to do it waits on a condition. Answers return through the caller's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from penstock.engine.requests import ABORTED, FULL, check_request, check_score, rest_of
from penstock.engine.torch_engine.lanes import LaneTeam
from penstock.engine.torch_engine.row import Pieces, Row
from penstock.engine.torch_engine.scheduler import Outcome, Scheduler, Watch
from penstock.engine.torch_engine.scoring import Scoring
from penstock.errors import InfrastructureFailure, RunError
from penstock.models.threads import Team, release_threads
from penstock.ports import Completion, EngineStats, GenerateRequest, LoadedWeights, Tokenizer, WeightSource
from penstock.rollout import FailureReason
from penstock.weights import StoredWeights
from penstock.weights.adapter import on_base

T = TypeVar("T")


class EmbeddedEngine:
    """The `Engine` port over a `Scheduler` in a thread of its own."""

    def __init__(
        self,
        make_scheduler: Callable[[Callable[[Row | Scoring, Outcome], None]], Scheduler],
        tokenizer: Tokenizer,
        *,
        model_dir: Path,
        vocab_size: int,
        max_context: int,
        team: Team | LaneTeam,
    ) -> None:
        self._scheduler = make_scheduler(self._finished)
        self._model_dir = model_dir
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._team = team
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._unanswered: set[asyncio.Future[Any]] = set()
        """Of calls and requests alike: all that must fail when the thread ends. Guarded by the condition."""
        self._outbox: list[tuple[asyncio.Future[Any], Any]] = []
        """Answers not handed over yet. Only the thread touches it."""
        self._pieces: list[tuple[Row, Completion]] = []
        """The same for streams."""
        self._paused = False
        self._asleep = False
        """Asleep, or about to be when the last request has ended. Only the thread touches these."""
        self._falling_asleep: list[asyncio.Future[None]] = []
        self._closing = False
        self._death: BaseException | None = None
        """What ended the thread, unless it was closed. Guarded by the condition, as is `_ended`."""
        self._ended = False
        self._busy_seconds = 0.0
        self._thread = threading.Thread(target=self._serve, name="penstock-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> Completion:
        row = self._row(request)
        if row.budget <= 0:
            return FULL
        self._send(lambda: self._start(row), row.answer)
        try:
            return await row.answer
        except asyncio.CancelledError:
            self._drop(row)
            raise

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        pieces: Pieces = asyncio.Queue()
        row, sent = self._row(request, pieces), 0
        if row.budget <= 0:
            yield FULL
            return
        self._send(lambda: self._start(row), row.answer)
        row.answer.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                sent += len(piece.ids) // 4
                yield piece
            yield rest_of(await row.answer, sent)
        finally:
            if not row.answer.done():
                row.answer.cancel()
                self._drop(row)

    async def score(self, ids: bytes) -> bytes:
        check_score(ids, vocab_size=self._vocab_size, max_context=self._max_context)
        if len(ids) < 8:
            return b""
        scoring = Scoring(ids, asyncio.get_running_loop().create_future())
        self._send(lambda: self._scheduler.add(scoring), scoring.answer)
        try:
            return await scoring.answer
        except asyncio.CancelledError:
            self._drop(scoring)
            raise

    def _row(self, request: GenerateRequest, pieces: Pieces | None = None) -> Row:
        check_request(request, vocab_size=self._vocab_size, max_context=self._max_context)
        return Row(request, self._tokenizer, asyncio.get_running_loop().create_future(), pieces)

    async def pause_generation(self) -> None:
        def pause() -> None:
            if not self._paused:
                self._paused = True
                self._scheduler.pause()

        await self._call(pause)

    async def continue_generation(self) -> None:
        def resume() -> None:
            self._paused = False
            self._scheduler.resume()
            self._rouse()

        await self._call(resume)

    async def abort(self, request_ids: Sequence[str]) -> None:
        ids = frozenset(request_ids)
        await self._call(lambda: self._scheduler.end(lambda row: row.request.request_id in ids))

    async def sleep(self) -> None:
        """Free the cache when the requests that are here have ended; the weights stay. Raises RunError unless paused.

        What comes later waits until `wake`.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fall_asleep() -> None:
            if not self._paused:
                self._answer(answer, RunError("the engine cannot sleep: it is not paused; pause it first"))
                return
            if not self._asleep:
                self._asleep = True
                self._scheduler.finish_what_is_here()
            self._falling_asleep.append(answer)

        self._send(fall_asleep, answer)
        await answer

    async def wake(self) -> None:
        """The cache comes back with the first request that needs it."""

        def wake() -> None:
            if self._paused:
                self._scheduler.pause()
            self._rouse()

        await self._call(wake)

    def _rouse(self) -> None:
        self._asleep = False
        for answer in self._falling_asleep:
            self._answer(answer, RunError("the engine was woken before it slept"))
        self._falling_asleep.clear()

    def _sleep_when_idle(self) -> None:
        if self._falling_asleep and not self._scheduler.has_work:
            self._scheduler.cache.release()
            self._scheduler.prefixes.forget()
            for answer in self._falling_asleep:
                self._answer(answer, None)
            self._falling_asleep.clear()

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights | None:
        """Between two steps. Running answers go on with the keys and values they have; each token says its weights."""

        def load() -> LoadedWeights | None:
            if not isinstance(source, StoredWeights):
                self._scheduler.load_weights(on_base(source, self._model_dir), model_step)
                return None
            with source.receive() as received:
                self._scheduler.load_weights(on_base(received, self._model_dir), model_step)
            return LoadedWeights(model_step=model_step, checksum=received.checksum)

        return await self._call(load)

    async def model_step(self) -> int:
        return await self._call(lambda: self._scheduler.model_step)

    async def check_health(self) -> None:
        await self._call(lambda: None)

    async def stats(self) -> EngineStats:
        return EngineStats(
            running=self._scheduler.running,
            waiting=self._scheduler.not_running,
            generated_tokens=self._scheduler.generated_tokens,
            busy_seconds=self._busy_seconds,
            cache_use=self._scheduler.cache_use,
        )

    def watch(self, watch: Watch) -> None:
        """`watch` hears of every stage of every step, in the engine's thread."""
        self._scheduler.watch = watch

    async def close(self) -> None:
        """End the thread after its current step. Pending requests fail. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    async def _call(self, work: Callable[[], T]) -> T:
        """Run `work` in the engine's thread between two steps, and hand back what it returns or raises."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except RunError as error:
                self._answer(answer, error)
            else:
                self._answer(answer, result)

        self._send(run, answer)
        return await answer

    def _send(self, command: Callable[[], None], answer: asyncio.Future[T]) -> None:
        with self._changed:
            if self._ended or self._closing:
                raise self._why_ended()
            self._unanswered.add(answer)
            self._commands.append(command)
            self._changed.notify()

    def _drop(self, request: Row | Scoring) -> None:
        with self._changed:
            self._unanswered.discard(request.answer)
            self._commands.append(lambda: self._scheduler.drop(request))
            self._changed.notify()

    def _answer(self, answer: asyncio.Future[Any], outcome: Any) -> None:
        self._outbox.append((answer, outcome))

    def _deliver(self) -> None:
        """Hand over what was answered, in order, when the state behind the answers is settled."""
        outbox, self._outbox = self._outbox, []
        pieces, self._pieces = self._pieces, []
        if not outbox and not pieces:
            return
        with self._changed:
            self._unanswered.difference_update(answer for answer, _ in outbox)
        loops = {answer.get_loop() for answer, _ in outbox} | {row.answer.get_loop() for row, _ in pieces}
        for loop in loops:
            # A loop that was closed with requests still running has nobody left to hear.
            with contextlib.suppress(RuntimeError):
                for row, piece in pieces:  # before the ends
                    if row.pieces is not None and row.answer.get_loop() is loop:
                        loop.call_soon_threadsafe(row.pieces.put_nowait, piece)
                loop.call_soon_threadsafe(_resolve, [pair for pair in outbox if pair[0].get_loop() is loop])

    def _finished(self, request: Row | Scoring, outcome: Outcome) -> None:
        if isinstance(request, Row) and isinstance(outcome, Completion) and outcome.finish_reason is None:
            self._pieces.append((request, outcome))
        else:
            self._answer(request.answer, outcome)

    def _start(self, row: Row) -> None:
        if self._paused and row.on_pause == "abort":
            self._answer(row.answer, ABORTED)
        else:
            self._scheduler.add(row)

    def _serve(self) -> None:
        death = None
        try:
            self._team.gather()
            with torch.inference_mode():
                while self._next_commands():
                    if self._scheduler.has_work:
                        started = time.perf_counter()
                        self._scheduler.step()
                        self._busy_seconds += time.perf_counter() - started
                        if (decoded := self._scheduler.decoded) is not None:
                            self._team.stepped(*decoded)
                    self._sleep_when_idle()
                    self._deliver()
        except BaseException as error:
            # Whatever ends this thread, those who wait must hear of it.
            death = error
        self._team.disband()
        self._deliver()
        with self._changed:
            self._ended, self._death = True, death
            left = list(self._unanswered)
            self._commands.clear()
        for answer in left:
            self._answer(answer, self._why_ended())
        self._deliver()

    def _why_ended(self) -> InfrastructureFailure:
        if self._death is None:
            return InfrastructureFailure("the engine was closed", reason=FailureReason.ENGINE_CLOSED)
        failure = InfrastructureFailure(f"the engine's thread died: {self._death!r}", reason=FailureReason.ENGINE_DIED)
        failure.__cause__ = self._death
        return failure

    @property
    def _something_to_do(self) -> bool:
        return bool(self._commands) or self._closing or self._scheduler.has_work

    def _next_commands(self) -> bool:
        """Wait until there is something to do and run what was asked; False when closing."""
        with self._changed:
            if not self._something_to_do:
                release_threads()
            while not self._something_to_do:
                self._changed.wait()
            if self._closing:
                return False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        self._deliver()
        return True


def _resolve(outcomes: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for answer, outcome in outcomes:
        if answer.done():  # Its caller was cancelled.
            continue
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
