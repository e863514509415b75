"""RemoteEngine: the `Engine` port over a socket to a process that runs `penstock.engine.server`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from penstock.engine.frames import MAX_FRAME, METHODS, Piece
from penstock.errors import InfrastructureFailure, WeightSyncError
from penstock.ports import Completion, EngineStats, GenerateRequest, LoadedWeights, WeightSource
from penstock.rollout import FailureReason
from penstock.weights.shared_memory import OwnSharedMemory
from penstock.weights.stored import StoredWeights
from penstock.wire import Call, Cancel, Failed, Reply, error_from_wire, frame, read_frame

WhyEnded = Callable[[], Awaitable[InfrastructureFailure]]


class RemoteEngine:
    """Belongs to the event loop it was made in. When the stream ends, all that is open fails with `why_ended`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, why_ended: WhyEnded) -> None:
        self._reader = reader
        self._writer = writer
        self._why_ended = why_ended
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._pieces: dict[int, asyncio.Queue[msgspec.Raw | None]] = {}
        """Of open streams."""
        self._end: InfrastructureFailure | None = None
        self._memory = OwnSharedMemory()
        self._reading = asyncio.create_task(self._read(), name="engine answers")

    async def generate(self, request: GenerateRequest) -> Completion:
        completion: Completion = await self._call("generate", request)
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        number = next(self._numbers)
        pieces: asyncio.Queue[msgspec.Raw | None] = asyncio.Queue()
        self._pieces[number] = pieces
        answer = asyncio.create_task(self._ask(number, "stream", request), name=f"stream {request.request_id}")
        answer.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield msgspec.msgpack.decode(piece, type=Completion)
            yield await answer
        finally:
            del self._pieces[number]
            answer.cancel()
            # Also an error that nobody waits for any more.
            await asyncio.wait([answer])
            if not answer.cancelled():
                answer.exception()

    async def score(self, ids: bytes) -> bytes:
        scores: bytes = await self._call("score", ids)
        return scores

    async def pause_generation(self) -> None:
        await self._call("pause_generation")

    async def continue_generation(self) -> None:
        await self._call("continue_generation")

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call("abort", list(request_ids))

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def load_weights(self, source: WeightSource, model_step: int) -> LoadedWeights:
        """Stored weights are read by the engine where they are; any others go through shared memory of this engine."""
        if isinstance(source, StoredWeights):
            return await self._load_stored(source, model_step)
        return await self._memory.load(source, lambda stored: self._load_stored(stored, model_step))

    async def model_step(self) -> int:
        step: int = await self._call("model_step")
        return step

    async def check_health(self) -> None:
        await self._call("check_health")

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._call("stats")
        return stats

    async def close(self) -> None:
        """Close the stream; the other side ends then. What is open fails. Idempotent."""
        self._end = self._end or InfrastructureFailure("the engine was closed", reason=FailureReason.ENGINE_CLOSED)
        self._fail_open(self._end)
        self._writer.close()
        # The stream ends when the other side closes it too, or is killed; that is the owner's to see to.
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await self._memory.close()

    async def _load_stored(self, stored: StoredWeights, model_step: int) -> LoadedWeights:
        loaded: LoadedWeights = await self._call("load_weights", stored, model_step)
        if loaded.checksum != stored.checksum:
            raise WeightSyncError(f"weights {model_step}: sent {stored.checksum}, received {loaded.checksum}")
        return loaded

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._ask(next(self._numbers), method, *arguments)

    async def _ask(self, number: int, method: str, *arguments: Any) -> Any:
        if self._end is not None:
            raise _again(self._end)
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        self._writer.write(frame(Call(number, method, msgspec.Raw(msgspec.msgpack.encode(arguments)))))
        try:
            result = await answer
        except asyncio.CancelledError:
            if self._end is None:
                self._writer.write(frame(Cancel(number)))
            raise
        finally:
            self._open.pop(number, None)
        return msgspec.msgpack.decode(result, type=METHODS[method][1])

    async def _read(self) -> None:
        problem: Exception | None = None
        try:
            while (body := await read_frame(self._reader, MAX_FRAME)) is not None:
                self._take(msgspec.msgpack.decode(body, type=Reply | Failed | Piece))
        except (InfrastructureFailure, msgspec.MsgspecError) as error:
            problem = error
        end = await self._why_ended()
        if problem is not None:
            end = InfrastructureFailure(
                f"the engine sent what cannot be read: {problem}; {end}", reason=FailureReason.BAD_FRAME
            )
        self._end = self._end or end
        self._fail_open(self._end)

    def _take(self, message: Reply | Failed | Piece) -> None:
        if isinstance(message, Piece):
            if message.number in self._pieces:
                self._pieces[message.number].put_nowait(message.result)
            return
        answer = self._open.get(message.number)
        if answer is None or answer.done():
            return
        if isinstance(message, Reply):
            answer.set_result(message.result)
        else:
            answer.set_exception(error_from_wire(message.error))

    def _fail_open(self, end: InfrastructureFailure) -> None:
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(_again(end))


def _again(end: InfrastructureFailure) -> InfrastructureFailure:
    """A fresh error for each that hears it: a shared one would collect their tracebacks."""
    return InfrastructureFailure(str(end), reason=end.reason)
