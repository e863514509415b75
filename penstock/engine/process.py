"""ProcessEngine: an engine in a process of its own, so that its work and its death are its own.

new --first call--> starting --> running --> dead --restart--> starting
                        |           |          ^
                        +-- fails --|----------+      close: from anywhere, for good

A dead engine fails every call with the same story, its exit code and last words, until it is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from penstock.child import Child
from penstock.engine.frames import MAX_FRAME, START, Setup
from penstock.engine.remote import RemoteEngine
from penstock.environment import child_environment
from penstock.errors import InfrastructureFailure, PenstockError
from penstock.ports import Completion, EngineStats, GenerateRequest, LoadedWeights, WeightSource
from penstock.rollout import FailureReason
from penstock.wire import Failed, Reply, error_from_wire, frame, read_frame


class ProcessEngine:
    """The `Engine` port. Starts with the first call; use it from one event loop at a time.

    `environment` names the variables that the process gets besides those of `child_environment`.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        python: str = sys.executable,
        environment: Sequence[str] = (),
        start_timeout_s: float = 300.0,
        close_timeout_s: float = 5.0,
    ) -> None:
        self._setup = setup
        self._python = python
        self._environment = environment
        self._start_timeout_s = start_timeout_s
        self._close_timeout_s = close_timeout_s
        self._child: _Child | None = None
        self._starting: asyncio.Task[RemoteEngine] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    async def generate(self, request: GenerateRequest) -> Completion:
        return await (await self._engine()).generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        async with contextlib.aclosing((await self._engine()).stream(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def score(self, ids: bytes) -> bytes:
        return await (await self._engine()).score(ids)

    async def pause_generation(self) -> None:
        await (await self._engine()).pause_generation()

    async def continue_generation(self) -> None:
        await (await self._engine()).continue_generation()

    async def abort(self, request_ids: Sequence[str]) -> None:
        await (await self._engine()).abort(request_ids)

    async def sleep(self) -> None:
        await (await self._engine()).sleep()

    async def wake(self) -> None:
        await (await self._engine()).wake()

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights:
        return await (await self._engine()).load_weights(source, model_step)

    async def model_step(self) -> int:
        return await (await self._engine()).model_step()

    async def check_health(self) -> None:
        await (await self._engine()).check_health()

    async def stats(self) -> EngineStats:
        return await (await self._engine()).stats()

    async def restart(self) -> None:
        """End the process, however it is, and start it anew: model step 0, nothing paused."""
        if self._closed:
            raise _closed()
        await self._stop(grace_s=0.0)
        await self._engine()

    async def close(self) -> None:
        """Ask the process to end, kill it after `close_timeout_s`. Idempotent."""
        self._closed = True
        await self._stop(grace_s=self._close_timeout_s)

    async def _engine(self) -> RemoteEngine:
        """Starts the process if it was never started. Raises what kept it from starting."""
        if self._closed:
            raise _closed()
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start engine process")
            self._starting.add_done_callback(_take_note)
        starting = self._starting
        try:
            # Shielded: a caller that gives up does not end the start for the others.
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():
                raise _closed() from None
            raise

    async def _start(self) -> RemoteEngine:
        child = self._child = await _Child.start(self._python, child_environment(self._environment))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return await child.connect(self._setup)
        except TimeoutError:
            raise InfrastructureFailure(
                f"the engine's process did not load {self._setup.model_dir} within {self._start_timeout_s:g} s"
                f"{child.last_words()}",
                reason=FailureReason.ENGINE_START_DEADLINE,
            ) from None
        finally:
            if child.engine is None:
                await child.end(grace_s=0.0)

    async def _stop(self, *, grace_s: float) -> None:
        starting, self._starting = self._starting, None
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        child, self._child = self._child, None
        if child is not None:
            await child.end(grace_s=grace_s)


class _Child:
    """One process, and the engine in it once that is loaded."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.engine: RemoteEngine | None = None

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @classmethod
    async def start(cls, python: str, environment: Mapping[str, str]) -> _Child:
        try:
            return cls(await Child.start("penstock.engine.server", python=python, environment=environment))
        except OSError as error:
            message = f"the engine's process could not be started: {error}"
            raise InfrastructureFailure(message, reason=FailureReason.ENGINE_START) from error

    async def connect(self, setup: Setup) -> RemoteEngine:
        """Returns when the model is loaded. Raises the error that the process met, as its own type."""
        reader, writer = await self._child.connect()
        writer.write(frame(setup))
        body = await read_frame(reader, MAX_FRAME)
        if body is None:
            raise await self.death()
        answer = msgspec.msgpack.decode(body, type=Reply | Failed)
        if isinstance(answer, Failed):
            error: PenstockError = error_from_wire(answer.error)
            raise error
        assert answer.number == START
        self.engine = RemoteEngine(reader, writer, self.death)
        return self.engine

    async def death(self) -> InfrastructureFailure:
        """Why the stream ended."""
        story = await self._child.story()
        return InfrastructureFailure(f"the engine's process {story}", reason=FailureReason.ENGINE_DIED)

    def last_words(self) -> str:
        return self._child.last_words()

    async def end(self, *, grace_s: float) -> None:
        """The process is gone when this returns."""
        try:
            if self.engine is not None:
                await self.engine.close()
        finally:
            await self._child.end(grace_s=grace_s)


def _closed() -> InfrastructureFailure:
    return InfrastructureFailure("the engine was closed", reason=FailureReason.ENGINE_CLOSED)


def _take_note(task: asyncio.Task[RemoteEngine]) -> None:
    """A start that nobody waits for any more may still fail, which asyncio would report as never retrieved."""
    if not task.cancelled():
        task.exception()
