"""Train ranks in processes of this machine: the program of one, and how its parent talks to it.

    python -m penstock.learn.rank_process <descriptor of the socket> <process id of the parent>

Calls are made one after the other in the process's main thread, `stop` at once in the one that reads. What is to
outlive a rank is kept in shared memory whose descriptor the parent holds.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from penstock.child import Child, socket_to_parent
from penstock.environment import child_environment
from penstock.errors import InfrastructureFailure, PenstockError
from penstock.learn.batch import TrainBatch
from penstock.learn.rank import Rank, RankSetup, StatePart
from penstock.learn.step_metrics import StepReport
from penstock.rollout import FailureReason, FloatArray
from penstock.unbuffered import FileSum
from penstock.weights.channel import WriterSettings
from penstock.weights.shared_memory import SharedMemoryBuffer
from penstock.weights.stored import SharedMemoryWeights, StoredWeights
from penstock.wire import Call, Failed, Reply, error_from_wire, error_to_wire, frame, read_blocking, read_frame

MAX_FRAME = (1 << 32) - 1
"""A batch of tokens, or the logprobs of one."""

METHODS: dict[str, tuple[Any, Any]] = {
    "open_store": (tuple[str], int),
    "join": (tuple[str, int], None),
    "train": (tuple[TrainBatch, int], StepReport | None),
    "stop": (tuple[int], None),
    "score": (tuple[TrainBatch], dict[str, list[FloatArray]]),
    "score_reference": (tuple[TrainBatch], dict[str, list[FloatArray]]),
    "save": (tuple[str], dict[str, FileSum]),
    "load": (tuple[str], None),
    "save_hf": (tuple[str], None),
    "keep": (tuple[bool], SharedMemoryWeights),
    "take": (tuple[SharedMemoryWeights, StatePart], None),
    "write_weights": (tuple[WriterSettings, int], StoredWeights | None),
    "confirm_weights": (tuple[()], None),
    "close_weights": (tuple[()], None),
}
"""The arguments and the result of everything that may be called; nothing else can be."""

_ARRAY = 1


def _encode_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"a {type(value).__name__} does not travel")
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((value.dtype.str, value.shape, value.tobytes())))


def _decode_array(code: int, data: memoryview) -> Any:
    kind, shape, values = msgspec.msgpack.decode(data)
    return np.frombuffer(values, dtype=kind).reshape(shape)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=_encode_array))


def _decode(data: msgspec.Raw, kind: Any) -> Any:
    return msgspec.msgpack.decode(data, type=kind, ext_hook=_decode_array, dec_hook=lambda _, value: value)


# In the parent.


class KeptMemory:
    """What a rank wrote to be kept; it is there as long as this is."""

    def __init__(self, written: SharedMemoryWeights) -> None:
        self._descriptor = os.open(written.path, os.O_RDWR | os.O_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.stored = msgspec.structs.replace(written, path=path)

    def close(self) -> None:
        os.close(self._descriptor)


class ProcessRank:
    """One rank, and the process it is in; implements `ranks.RankHost`. Belongs to the event loop it was started in."""

    node = ""
    address = "127.0.0.1"

    def __init__(self, child: Child) -> None:
        self._child = child
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self.death: str | None = None
        self._gone = asyncio.Event()

    @classmethod
    async def start(cls, setup: RankSetup, environment: Mapping[str, str]) -> ProcessRank:
        try:
            child = await Child.start("penstock.learn.rank_process", python=sys.executable, environment=environment)
        except OSError as error:
            message = f"the process of rank {setup.rank} could not be started: {error}"
            raise InfrastructureFailure(message, reason=FailureReason.ENGINE_START) from error
        rank = cls(child)
        reader, rank._writer = await child.connect()
        rank._writer.write(frame(setup))
        rank._reading = asyncio.create_task(rank._read(reader), name=f"answers of rank {setup.rank}")
        return rank

    @property
    def pid(self) -> int:
        return self._child.process.pid

    async def call(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        if self.death is not None:
            raise _died(self.death)
        self._open[number] = answer
        assert self._writer is not None
        try:
            self._writer.write(frame(Call(number, method, _raw(arguments))))
            await self._writer.drain()
            return _decode(await answer, METHODS[method][1])
        except ConnectionError:  # the reader learns why
            return _decode(await answer, METHODS[method][1])
        finally:
            self._open.pop(number, None)

    async def gone(self) -> None:
        await self._gone.wait()

    async def node_lives(self) -> bool:
        return True  # it is this one

    async def keep(self, whole: bool) -> KeptMemory:
        return KeptMemory(await self.call("keep", whole))

    async def take(self, kept: KeptMemory, part: StatePart) -> None:
        await self.call("take", kept.stored, part)

    async def end(self) -> None:
        """The process is gone when this returns."""
        await self._child.end(grace_s=0.0)
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _read(self, reader: asyncio.StreamReader) -> None:
        problem = ""
        try:
            while (body := await read_frame(reader, MAX_FRAME)) is not None:
                message = msgspec.msgpack.decode(body, type=Reply | Failed)
                answer = self._open.get(message.number)
                if answer is None or answer.done():
                    continue
                if isinstance(message, Reply):
                    answer.set_result(message.result)
                else:
                    answer.set_exception(error_from_wire(message.error))
        except (PenstockError, msgspec.MsgspecError) as error:
            problem = f"; it sent what cannot be read: {error}"
        self.death = f"its process {await self._child.story()}{problem}"
        self._gone.set()
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(_died(self.death))


class ProcessRanks:
    """Starts ranks on this machine; implements `ranks.RankLauncher`."""

    def __init__(self, environment: Sequence[str] = ()) -> None:
        """`environment` names the variables that they get besides those of `child_environment`."""
        self._environment = environment

    async def launch(self, setups: Sequence[RankSetup]) -> list[ProcessRank]:
        # Computing threads are set by whoever computes.
        environment = child_environment(self._environment)
        started: list[ProcessRank] = []
        try:
            for setup in setups:
                placed = msgspec.structs.replace(setup, local_rank=setup.rank)
                started.append(await ProcessRank.start(placed, environment))
        except BaseException:
            for rank in started:
                await rank.end()
            raise
        return started

    async def close(self) -> None:
        pass


def _died(story: str) -> InfrastructureFailure:
    return InfrastructureFailure(story, reason=FailureReason.ENGINE_DIED)


# In the process.


class _Process:
    def __init__(self, channel: socket.socket, rank: Rank) -> None:
        self._channel = channel
        self._rank = rank
        self._sending = threading.Lock()
        self._calls: queue.Queue[Call | None] = queue.Queue()
        self._kept = SharedMemoryBuffer()

    def run(self) -> None:
        threading.Thread(target=self._listen, name="penstock-rank-calls", daemon=True).start()
        while (call := self._calls.get()) is not None:
            self._answer(call)

    def _listen(self) -> None:
        while (body := read_blocking(self._channel)) is not None:
            call = msgspec.msgpack.decode(body, type=Call)
            if call.method == "stop":
                self._answer(call)
            else:
                self._calls.put(call)
        # Whatever it computes, nobody waits for it.
        os._exit(0)

    def _answer(self, call: Call) -> None:
        answer: Reply | Failed
        try:
            answer = Reply(call.number, _raw(self._run(call)))
        except Exception as error:  # whatever it is, the parent must hear of it
            answer = Failed(call.number, error_to_wire(error))
        with self._sending:
            self._channel.sendall(frame(answer))

    def _run(self, call: Call) -> Any:
        arguments = _decode(call.arguments, METHODS[call.method][0])
        if call.method == "keep":
            # What was written last is held by the parent by now.
            self._kept.confirm()
            return self._kept.write(_State(self._rank.state(*arguments)))
        if call.method == "take":
            stored, part = arguments
            with stored.receive() as received:
                return self._rank.set_state(dict(received.tensors()), part)
        return getattr(self._rank, call.method)(*arguments)


class _State:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()


def main(descriptor: int, parent: int) -> None:
    channel = socket_to_parent(descriptor, parent)
    body = read_blocking(channel)
    if body is not None:
        _Process(channel, Rank(msgspec.msgpack.decode(body, type=RankSetup))).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
