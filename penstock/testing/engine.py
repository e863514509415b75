"""ScriptedEngine: an engine without a model. Lengths, speed and faults come from a script; time is the event loop's.

An answer is a function of the request's seed, so a continued answer is the one that was interrupted. Tokens are made
one by one at the script's speed: a pause finds as many as there was time for, each with the weights that made it.
"""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine.requests import ABORTED, FULL, rest_of
from penstock.errors import InfrastructureFailure, RunError
from penstock.ports import Completion, EngineStats, GenerateRequest, WeightSource
from penstock.rollout import FailureReason, FinishReason
from penstock.testing.script import Distribution, constant, uniform
from penstock.testing.tokenizer import END

Answers = Callable[[GenerateRequest], Sequence[int]]
"""The whole answer to a request, including what the request already brings of it."""


class EngineFaults(msgspec.Struct, frozen=True, kw_only=True):
    """How often what happens, 0 to 1. The first five are per request and exclude each other."""

    fails: float = 0.0
    """Raises InfrastructureFailure half-way."""
    hangs: float = 0.0
    """Never answers, and does not hear an abort either."""
    slow: float = 0.0
    """Runs at a hundredth of its speed."""
    nonsense: float = 0.0
    """Answers with columns of different lengths, logprobs that are not finite, or no token at all."""
    wrong_version: float = 0.0
    """Ascribes its tokens to weights that do not exist yet."""
    pause_fails: float = 0.0
    pause_hangs: float = 0.0


class EngineScript(msgspec.Struct, frozen=True, kw_only=True):
    slots: int = 1024
    """Requests served at a time; the others wait in line."""
    tokens_per_s: float = 100.0
    """Per slot."""
    length: Distribution = uniform(5, 50)
    latency_s: Distribution = constant(0.0)
    """Before the first token."""
    pause_s: float = 0.0
    """How long a pause takes to stop the engine."""
    answers: Answers | None = None
    """Overrides `length`: what is said to whom."""
    faults: EngineFaults = EngineFaults()


class _Serving:
    """One request in a slot, or in line for one."""

    __slots__ = ("answer", "done", "fault", "latency_s", "made", "request", "since", "steps", "timer", "tokens_per_s")

    def __init__(self, request: GenerateRequest, answer: Sequence[int], done: asyncio.Future[Completion]) -> None:
        self.request = request
        self.answer = answer
        self.done = done
        self.fault = ""
        self.latency_s = 0.0
        self.tokens_per_s = 1.0
        self.made = len(request.response_ids) // 4
        self.steps: list[tuple[int, int]] = []
        self.since: float | None = None
        """When the next token was begun; None while in line or frozen."""
        self.timer: asyncio.TimerHandle | None = None


class ScriptedEngine:
    def __init__(self, script: EngineScript | None = None, *, seed: int = 0) -> None:
        self.script = script or EngineScript()
        self.faults = self.script.faults
        """May be changed while the engine runs."""
        self.served: collections.Counter[str] = collections.Counter()
        """Requests by id."""
        self.pauses_asked = 0
        self._seed = seed
        self._model_step = 0
        self._paused = False
        self._last: frozenset[_Serving] | None = None
        """While asleep, or falling asleep: the requests that finish first. None: awake."""
        self._awake = asyncio.Event()
        self._awake.set()
        self._line: collections.deque[_Serving] = collections.deque()
        self._slots: dict[_Serving, None] = {}
        self._generated = 0
        self._closed = False

    async def generate(self, request: GenerateRequest) -> Completion:
        await self.check_health()
        if (answer := self._answer_at_the_door(request)) is not None:
            return answer
        serving = self._take(request)
        try:
            return await serving.done
        finally:
            self._leave(serving)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        """A piece for every token, as it is made."""
        await self.check_health()
        if (answer := self._answer_at_the_door(request)) is not None:
            yield answer
            return
        serving, sent = self._take(request), 0
        try:
            while not (await asyncio.wait([serving.done], timeout=1 / serving.tokens_per_s))[0]:
                piece = rest_of(self._so_far(serving), sent)
                if piece.ids:
                    sent += len(piece.ids) // 4
                    yield piece
            yield rest_of(await serving.done, sent)
        finally:
            self._leave(serving)

    async def score(self, ids: bytes) -> bytes:
        """The logprobs that these tokens would have if this engine had made them."""
        await self._awake.wait()
        await self.check_health()
        return _logprobs(np.frombuffer(ids, dtype=np.int32)[1:]).tobytes()

    async def pause_generation(self) -> None:
        self.pauses_asked += 1
        rng = random.Random(f"{self._seed}/pause/{self.pauses_asked}")
        fault = rng.random()
        if fault < self.faults.pause_hangs:
            await asyncio.get_running_loop().create_future()
        if fault < self.faults.pause_hangs + self.faults.pause_fails:
            raise InfrastructureFailure("the scripted engine did not take the pause", reason=FailureReason.ENGINE_ERROR)
        if self.script.pause_s:
            await asyncio.sleep(self.script.pause_s)
        self._paused = True
        if self._last is None:
            self._stop()

    async def continue_generation(self) -> None:
        self._paused = False
        self._rouse()

    async def abort(self, request_ids: Sequence[str]) -> None:
        for serving in [*self._slots, *self._line]:
            if serving.request.request_id in request_ids:
                self._freeze(serving)
                self._abort(serving)

    async def sleep(self) -> None:
        if not self._paused:
            raise RunError("the engine cannot sleep: it is not paused; pause it first")
        if self._last is None:
            self._awake.clear()
            here = [*self._slots, *self._line]
            self._last = frozenset(serving for serving in here if serving.request.on_pause != "abort")
            self._fill_slots()
        if self._last:
            await asyncio.wait([serving.done for serving in self._last])

    async def wake(self) -> None:
        self._rouse()
        if self._paused:
            self._stop()

    async def load_weights(self, source: WeightSource, model_step: int) -> None:
        """The tokens from here on are made by `model_step`; nothing is read from the source."""
        running = [serving for serving in self._slots if serving.since is not None]
        for serving in running:
            self._freeze(serving)
        self._model_step = model_step
        for serving in running:
            self._run(serving)

    async def model_step(self) -> int:
        return self._model_step

    async def check_health(self) -> None:
        if self._closed:
            raise _closed()

    async def stats(self) -> EngineStats:
        generated = self._generated + sum(self._made_since_then(serving) for serving in self._slots)
        return EngineStats(running=len(self._slots), waiting=len(self._line), generated_tokens=generated)

    async def close(self) -> None:
        self._closed = True
        self._awake.set()
        for serving in [*self._slots, *self._line]:
            self._freeze(serving)
            if not serving.done.done():
                serving.done.set_exception(_closed())

    # Inside.

    def _answer_at_the_door(self, request: GenerateRequest) -> Completion | None:
        if len(request.response_ids) >= 4 * request.params.max_tokens:
            return FULL
        return ABORTED if self._paused and request.on_pause == "abort" else None

    def _take(self, request: GenerateRequest) -> _Serving:
        self.served[request.request_id] += 1
        rng = random.Random(f"{self._seed}/{request.request_id}/{self.served[request.request_id]}")
        serving = _Serving(request, self._answer(request), asyncio.get_running_loop().create_future())
        serving.fault = self._draw_fault(rng)
        serving.latency_s = max(0.0, self.script.latency_s(rng))
        serving.tokens_per_s = self.script.tokens_per_s / (100 if serving.fault == "slow" else 1)
        self._line.append(serving)
        self._fill_slots()
        return serving

    def _stop(self) -> None:
        """Aborted requests end, kept ones give their slots to those that are served."""
        for serving in [*self._slots, *self._line]:
            if serving.request.on_pause == "abort":
                self._freeze(serving)
                self._abort(serving)
        for serving in reversed([s for s in self._slots if s.request.on_pause == "keep"]):
            self._freeze(serving)
            del self._slots[serving]
            self._line.appendleft(serving)
        self._fill_slots()

    def _rouse(self) -> None:
        self._last = None
        self._awake.set()
        self._fill_slots()

    def _may_run(self, serving: _Serving) -> bool:
        if self._last is not None:
            return serving in self._last
        return not self._paused or serving.request.on_pause == "serve"

    def _answer(self, request: GenerateRequest) -> Sequence[int]:
        if self.script.answers is not None:
            answer = self.script.answers(request)
        else:
            length = max(1, round(self.script.length(random.Random(request.seed))))
            letters = 97 + (request.seed % 9973 + 7 * np.arange(length)) % 26
            letters[-1] = END
            answer = letters.tolist()
        stops = request.params.stop_token_ids
        end = next((place + 1 for place, token in enumerate(answer) if token in stops), None) if stops else None
        return answer[:end]

    def _draw_fault(self, rng: random.Random) -> str:
        at = rng.random()
        for name in ("fails", "hangs", "slow", "nonsense", "wrong_version"):
            share = getattr(self.faults, name)
            if at < share:
                return name
            at -= share
        return ""

    def _fill_slots(self) -> None:
        if not self._paused:
            while self._line and len(self._slots) < self.script.slots:
                self._seat(self._line.popleft())
            return
        for serving in [serving for serving in self._line if self._may_run(serving)]:
            if len(self._slots) < self.script.slots:
                self._line.remove(serving)
                self._seat(serving)

    def _seat(self, serving: _Serving) -> None:
        self._slots[serving] = None
        self._run(serving)

    def _run(self, serving: _Serving) -> None:
        """Begin the next token, and set the timer for the last one."""
        loop = asyncio.get_running_loop()
        serving.since = loop.time() + serving.latency_s
        serving.latency_s = 0.0
        left = min(len(serving.answer), serving.request.params.max_tokens) - serving.made
        if serving.fault != "hangs":
            share = 0.5 if serving.fault == "fails" else 1.0
            serving.timer = loop.call_at(
                serving.since + max(0, left) * share / serving.tokens_per_s, self._finish, serving
            )

    def _freeze(self, serving: _Serving) -> None:
        """Count the tokens there was time for as made by the weights of now."""
        if serving.timer is not None:
            serving.timer.cancel()
            serving.timer = None
        if serving.since is not None:
            self._make(serving, self._made_since_then(serving))
            serving.since = None

    def _made_since_then(self, serving: _Serving) -> int:
        """Tokens of this request that are not counted yet."""
        if serving.since is None:
            return 0
        seconds = asyncio.get_running_loop().time() - serving.since
        last = min(len(serving.answer), serving.request.params.max_tokens)
        return max(0, min(int(seconds * serving.tokens_per_s), last - serving.made))

    def _make(self, serving: _Serving, n: int) -> None:
        serving.made += n
        if serving.steps and serving.steps[-1][0] == self._model_step:
            n_before = serving.steps.pop()[1]
            serving.steps.append((self._model_step, n_before + n))
        else:
            serving.steps.append((self._model_step, n))
        self._generated += n

    def _finish(self, serving: _Serving) -> None:
        if serving.done.done():
            return
        if serving.fault == "fails":
            serving.done.set_exception(
                InfrastructureFailure("the scripted engine failed", reason=FailureReason.ENGINE_ERROR)
            )
            return
        last = min(len(serving.answer), serving.request.params.max_tokens)
        self._make(serving, max(0, last - serving.made))
        whole = last == len(serving.answer)
        serving.done.set_result(_completion(serving, FinishReason.STOP if whole else FinishReason.LENGTH))

    def _abort(self, serving: _Serving) -> None:
        if serving.done.done() or serving.fault == "hangs":
            return
        if serving.made >= min(len(serving.answer), serving.request.params.max_tokens):
            self._finish(serving)
        else:
            serving.done.set_result(_completion(serving, FinishReason.ABORT))

    def _so_far(self, serving: _Serving) -> Completion:
        """What there is of an answer that is being made."""
        n = self._made_since_then(serving)
        return _completion(serving, None, made=serving.made + n, steps=[*serving.steps, (self._model_step, n)])

    def _leave(self, serving: _Serving) -> None:
        if serving.timer is not None:
            serving.timer.cancel()
        serving.done.cancel()
        if self._slots.pop(serving, 0) is None:
            self._fill_slots()
        elif serving in self._line:
            self._line.remove(serving)


def _closed() -> InfrastructureFailure:
    return InfrastructureFailure("the scripted engine was closed", reason=FailureReason.ENGINE_CLOSED)


def _completion(
    serving: _Serving,
    finish_reason: FinishReason | None,
    *,
    made: int | None = None,
    steps: Sequence[tuple[int, int]] | None = None,
) -> Completion:
    begun = len(serving.request.response_ids) // 4
    ids = np.asarray(serving.answer[begun : serving.made if made is None else made], dtype=np.int32)
    logprobs = _logprobs(ids)
    runs = tuple((step, n) for step, n in (serving.steps if steps is None else steps) if n)
    if serving.fault == "wrong_version":
        runs = tuple((step + 3, n) for step, n in runs)
    if serving.fault == "nonsense" and len(ids):
        kind = len(ids) % 3
        if kind == 0:
            logprobs = logprobs[:-1]
        elif kind == 1:
            logprobs[-1] = np.nan
        else:
            ids, logprobs, runs = ids[:0], logprobs[:0], ()
            finish_reason = FinishReason.STOP
    return Completion(ids=ids.tobytes(), logprobs=logprobs.tobytes(), finish_reason=finish_reason, steps=runs)


def _logprobs(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    return np.float32(-0.5) - (ids % 8).astype(np.float32) / np.float32(8)
