"""Calls between two processes, here between two halves of one."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from penstock.cluster.peer import Answer, Answering, Asking, Message, decode_messages, encode_messages
from penstock.cluster.wire import MISSING, pack, read_answer
from penstock.errors import DataFailure
from penstock.rollout import FailureReason


class Object:
    def __init__(self):
        self.told = []
        self.cancelled = asyncio.Event()
        self.waiting = asyncio.Event()

    async def double(self, number):
        return 2 * number

    async def fail(self):
        raise DataFailure("no", reason=FailureReason.TOOL_DEADLINE)

    async def wait(self):
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def cancel_itself(self):
        raise asyncio.CancelledError

    async def count(self, end):
        try:
            for number in range(end):
                yield number
                await asyncio.sleep(0)
            if end == 2:
                raise ValueError("two is enough")
        finally:
            self.cancelled.set()

    def notice(self, what):
        self.told.append(what)


class Both:
    """Two sides; what is sent goes over as bytes, as it would between processes."""

    def __init__(self):
        self.object = Object()
        self.asking = Asking(self._over)
        self.answering = Answering(self._back, self._find, "test")

    async def _find(self, part):
        return self.object if part == "object" else None

    def _over(self, message: Message) -> None:
        asyncio.get_running_loop().call_soon(self.answering.take, *decode_messages(encode_messages([message])))

    def _back(self, message: Message) -> None:
        (answer,) = decode_messages(encode_messages([message]))
        assert isinstance(answer, Answer)
        asyncio.get_running_loop().call_soon(self.asking.take, answer)

    async def call(self, method, *arguments):
        return read_answer(await self.asking.call("object", method, pack(arguments)))


def run(test):
    async def with_both():
        async with asyncio.timeout(10):
            await test(Both())

    asyncio.run(with_both())


def test_a_call_has_its_answer_and_an_error_is_itself():
    async def test(both):
        assert await asyncio.gather(*(both.call("double", number) for number in range(100))) == list(range(0, 200, 2))
        with pytest.raises(DataFailure) as caught:
            await both.call("fail")
        assert caught.value.reason is FailureReason.TOOL_DEADLINE
        with pytest.raises(AttributeError):
            await both.call("nothing_like_that")
        assert await both.asking.call("other", "double", pack((1,))) == MISSING
        assert not both.asking

    run(test)


def test_a_call_that_is_cancelled_is_cancelled_where_it_runs():
    async def test(both):
        calling = asyncio.create_task(both.call("wait"))
        await both.object.waiting.wait()
        assert both.asking
        calling.cancel()
        await both.object.cancelled.wait()
        assert not both.asking

    run(test)


def test_one_that_cancels_itself_is_not_waited_for():
    async def test(both):
        with pytest.raises(RuntimeError, match="cancel_itself was cancelled where it ran"):
            await both.call("cancel_itself")

    run(test)


def test_a_stream_ends_fails_or_is_left():
    async def test(both):
        def stream(end):
            return both.asking.stream("object", "count", pack((end,)))

        assert [read_answer(answer) async for answer in stream(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="two is enough"):
            async for answer in stream(2):
                read_answer(answer)
        both.object.cancelled.clear()
        async with contextlib.aclosing(stream(10**9)) as answers:
            async for _ in answers:
                break
        await both.object.cancelled.wait()
        assert not both.asking

    run(test)


def test_what_waits_fails_when_the_other_side_is_gone_and_what_runs_ends():
    async def test(both):
        calls = [asyncio.create_task(both.call("wait")) for _ in range(3)]
        await both.object.waiting.wait()
        both.asking.fail(lambda: ConnectionError("gone"))
        assert all(isinstance(e, ConnectionError) for e in await asyncio.gather(*calls, return_exceptions=True))
        await both.answering.drop()
        assert both.object.cancelled.is_set()

    run(test)


def test_one_way_messages_arrive_in_order_and_one_in_vain_harms_nobody(caplog):
    async def test(both):
        for number in range(5):
            both.asking.tell("object", "notice", (number,))
        both.asking.tell("object", "nothing_like_that", ())
        await both.call("double", 1)
        assert both.object.told == [0, 1, 2, 3, 4]

    run(test)
    assert "in vain" in caplog.text
