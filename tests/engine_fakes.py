"""Engines that fail on purpose, and a controller over them on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from penstock.engine import RolloutControllerConfig
from penstock.engine.controller import RolloutController
from penstock.errors import DataFailure, InfrastructureFailure, WeightSyncError
from penstock.events import EngineChanged, EngineSeen, Event
from penstock.ports import Completion, EngineStats, GenerateRequest, LoadedWeights, OnPause
from penstock.rollout import FailureReason, FinishReason, SampleParams, pack_ids, pack_logprobs
from penstock.testing.clock import run_virtual

NOTHING = Completion(ids=b"", logprobs=b"", finish_reason=FinishReason.ABORT, steps=())


class Kept:
    """Weights that can be read again."""

    def __init__(self, checksum: str = "c0ffee") -> None:
        self.checksum = checksum
        self.lost: Exception | None = None
        """Why they cannot be read any more."""

    def tensors(self) -> Any:
        return iter(())


class Live:
    """Weights that change with the next train step."""

    def tensors(self) -> Any:
        return iter(())


class FakeEngine:
    """Answers each request after `seconds`, with `tokens` tokens of its model step."""

    def __init__(self, *, seconds: float = 1.0, tokens: int = 4, restarts: bool = True) -> None:
        self.seconds, self.tokens, self.can_restart = seconds, tokens, restarts
        self.step = 0
        self.dead = False
        self.hangs = False
        self.control_hangs = False
        self.spoil: Callable[[Completion], Completion] = lambda completion: completion
        self.refuses: str = ""
        self.forgets_scores = 0
        self.paused = False
        self.asleep = False
        self.state = "recovering"
        self.seen: EngineSeen | None = None
        """What the controller said of it last."""
        self.served: list[str] = []
        self.most_running = 0
        self.loads: list[int] = []
        self.starts = 1
        self.busy_s = 0.0
        """Of its present process."""
        self.start_s = 1.0
        self.health_s = 0.0
        self._running: dict[str, asyncio.Future[None]] = {}
        self._on_pause: dict[str, str] = {}

    async def generate(self, request: GenerateRequest) -> Completion:
        self._alive()
        if self.paused and request.on_pause == "abort":
            return NOTHING
        if request.group_id == "bad data":
            raise DataFailure("cannot be served", reason=FailureReason.CONTEXT_TOO_LONG)
        self.served.append(request.request_id)
        aborted = self._running[request.request_id] = asyncio.get_running_loop().create_future()
        self._on_pause[request.request_id] = request.on_pause
        self.most_running = max(self.most_running, len(self._running))
        try:
            async with asyncio.timeout(None if self.hangs else self.seconds):
                await aborted
            return NOTHING
        except TimeoutError:
            pass
        finally:
            del self._running[request.request_id]
        self.busy_s += self.seconds
        ids = [request.seed % 97] * self.tokens
        return self.spoil(
            Completion(
                ids=pack_ids(ids),
                logprobs=pack_logprobs([-1.0] * self.tokens),
                finish_reason=FinishReason.LENGTH,
                steps=((self.step, self.tokens),),
            )
        )

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        """One token at a time, and an end without any."""
        whole = await self.generate(request)
        for place in range(len(whole.ids) // 4):
            part = slice(4 * place, 4 * place + 4)
            yield Completion(
                ids=whole.ids[part], logprobs=whole.logprobs[part], finish_reason=None, steps=((self.step, 1),)
            )
            await asyncio.sleep(0.1)
            self._alive()
        yield Completion(ids=b"", logprobs=b"", finish_reason=whole.finish_reason, steps=())

    async def score(self, ids: bytes) -> bytes:
        self._alive()
        await asyncio.sleep(self.seconds)
        self._alive()
        return pack_logprobs([-1.0] * (len(ids) // 4 - 1 - self.forgets_scores))

    async def pause_generation(self) -> None:
        await self._obey()
        self.paused = True
        self._end([name for name in self._running if self._on_pause[name] == "abort"])

    async def continue_generation(self) -> None:
        await self._obey()
        self.paused = False

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._obey()
        self._end([name for name in request_ids if name in self._running])

    async def sleep(self) -> None:
        await self._obey()
        self.asleep = True

    async def wake(self) -> None:
        await self._obey()
        self.asleep = False

    async def load_weights(self, source: Any, model_step: int) -> LoadedWeights | None:
        await self._obey()
        await asyncio.sleep(0.1)
        self._alive()
        if (lost := getattr(source, "lost", None)) is not None:
            raise lost
        if self.refuses == "weights":
            raise WeightSyncError("shapes do not fit, the old ones are kept")
        if self.refuses == "hang":
            await asyncio.Event().wait()
        self.loads.append(model_step)
        if self.refuses == "other step":
            return None
        self.step = model_step
        checksum = getattr(source, "checksum", None)
        return LoadedWeights(model_step=model_step, checksum="bits flipped" if self.refuses == "bytes" else checksum)

    async def model_step(self) -> int:
        await self._obey()
        return self.step

    async def check_health(self) -> None:
        await self._obey()
        await asyncio.sleep(self.health_s)

    async def stats(self) -> EngineStats:
        await self._obey()
        return EngineStats(
            running=len(self._running), generated_tokens=self.tokens * len(self.served), busy_seconds=self.busy_s
        )

    async def restart(self) -> None:
        self.starts += 1
        await asyncio.sleep(self.start_s)
        if not self.can_restart:
            raise InfrastructureFailure("no such device", reason=FailureReason.ENGINE_START)
        self.dead = self.hangs = self.control_hangs = False
        self.spoil = lambda completion: completion
        self.step, self.paused, self.asleep, self.busy_s = 0, False, False, 0.0

    async def close(self) -> None:
        self.die()

    def die(self) -> None:
        self.dead = True
        for future in self._running.values():
            if not future.done():
                future.set_exception(InfrastructureFailure("killed by SIGKILL", reason=FailureReason.ENGINE_DIED))

    def _end(self, names: list[str]) -> None:
        for name in names:
            if not self._running[name].done():
                self._running[name].set_result(None)

    def _alive(self) -> None:
        if self.dead:
            raise InfrastructureFailure("killed by SIGKILL", reason=FailureReason.ENGINE_DIED)

    async def _obey(self) -> None:
        self._alive()
        if self.control_hangs:
            await asyncio.Event().wait()


ON_PAUSE: tuple[OnPause, ...] = ("abort", "keep", "serve")


def request(name: str, *, group: str = "", seed: int = 5, on_pause: OnPause = "abort") -> GenerateRequest:
    params = SampleParams(max_tokens=4)
    return GenerateRequest(
        request_id=name, prompt_ids=pack_ids([1]), params=params, seed=seed, group_id=group, on_pause=on_pause
    )


class Reporter:
    """Notes on each engine what the controller says of it."""

    def __init__(self, engines: dict[str, Any]) -> None:
        self._engines = engines

    def notice(self, event: Event) -> None:
        if isinstance(event, EngineChanged):
            assert event.reason
            self._engines[event.engine].state = event.state
        elif isinstance(event, EngineSeen):
            self._engines[event.engine].seen = event


def states(engines: dict[str, Any]) -> set[str]:
    return {engine.state for engine in engines.values()}


Test = Callable[[RolloutController, dict[str, Any]], Coroutine[Any, Any, None]]


def play(test: Test, *, seed: int | None = 0, names: str = "ab", **limits: Any) -> dict[str, Any]:
    engines = {name: FakeEngine() for name in names}

    async def main() -> None:
        controller = RolloutControllerConfig(**limits).build(engines, observer=Reporter(engines))  # type: ignore[arg-type]
        try:
            await controller.check_health()
            await until(lambda: states(engines) == {"active"})
            await test(controller, engines)
        finally:
            await controller.close()

    run_virtual(main(), seed=seed, deadline=10_000.0)
    return engines


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - on the virtual clock this costs nothing
        await asyncio.sleep(0.01)


async def ask_all(controller: RolloutController, count: int, **fields: Any) -> list[Completion]:
    return await asyncio.gather(*(controller.generate(request(f"r{i}", **fields)) for i in range(count)))


def nonsense(completion: Completion, **changes: Any) -> Completion:
    fields = {name: getattr(completion, name) for name in completion.__struct_fields__}
    return Completion(**{**fields, **changes})
