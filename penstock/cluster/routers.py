"""Several actors as one, and one actor: whom a proxy asks.

A call goes to the actor with the fewest calls in flight; those with equally many take turns. One that is lost costs its
calls one more try, elsewhere or, where there is no other, when it is back; meanwhile it is given nothing, and asked now
and then whether it is there again. Control calls reach all that are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from penstock.cluster import host
from penstock.cluster.line import SILENT_S
from penstock.cluster.member import ActorGone, Member, Part

WAIT_S = 120.0
"""How long a call waits for an actor when all are lost. Ray starts one again in seconds, on another node in tens."""
PROBE_S = 0.25
RENEWALS = 3
"""Of the patience of a call: what it asks for may be what kills the actor."""


class Router:
    """A `Caller`. It may travel: in another process it counts that process's calls."""

    def __init__(self, part: Part, members: list[Member], wait_s: float = WAIT_S) -> None:
        self.part = part
        self.members = members
        self._wait_s = wait_s
        self._in_flight = [0] * len(members)
        self._turn = 0
        self._lost: dict[int, asyncio.Task[None]] = {}
        """Members that are not asked, and who looks whether they are back."""
        self._back: asyncio.Event | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Router, (self.part, self.members, self._wait_s)

    async def call(self, method: str, *arguments: Any) -> Any:
        index = await self._choose()
        try:
            return await self._ask(index, method, arguments)
        except ActorGone:
            self._lose(index)
        index = await self._choose()
        try:
            return await self._ask(index, method, arguments)
        except ActorGone:
            self._lose(index)
            raise

    async def control(self, method: str, *arguments: Any) -> list[Any]:
        """One that is lost has nothing to pause and nothing to tell."""
        self._forget_other_loops()
        asked = [index for index in range(len(self.members)) if index not in self._lost]
        answers = await asyncio.gather(
            *(self.members[index].control(self.part, method, *arguments) for index in asked), return_exceptions=True
        )
        told = []
        for index, answer in zip(asked, answers, strict=True):
            if isinstance(answer, ActorGone):
                self._lose(index)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                told.append(answer)
        return told

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Not tried elsewhere: what was handed out cannot be taken back."""
        index = await self._choose()
        self._in_flight[index] += 1
        try:
            async with contextlib.aclosing(self.members[index].stream(self.part, method, *arguments)) as pieces:
                async for piece in pieces:
                    yield piece
        except ActorGone:
            self._lose(index)
            raise
        finally:
            self._in_flight[index] -= 1

    async def _ask(self, index: int, method: str, arguments: tuple[Any, ...]) -> Any:
        self._in_flight[index] += 1
        try:
            return await self.members[index].call(self.part, method, *arguments)
        finally:
            self._in_flight[index] -= 1

    async def _choose(self) -> int:
        """The least busy of those that are there. Raises ActorGone when none is for too long."""
        self._forget_other_loops()
        if len(self._lost) == len(self.members):
            assert self._back is not None
            try:
                async with asyncio.timeout(self._wait_s):
                    while len(self._lost) == len(self.members):
                        await self._back.wait()
            except TimeoutError:
                names = ", ".join(member.name for member in self.members)
                raise ActorGone(f"no actor was there for {self._wait_s:g} s: {names}") from None
        count = len(self.members)
        order = [(self._turn + i) % count for i in range(count)]
        chosen = min((i for i in order if i not in self._lost), key=self._in_flight.__getitem__)
        self._turn = (chosen + 1) % count
        return chosen

    def _lose(self, index: int) -> None:
        if index in self._lost:
            return
        if self._back is None or not self._lost:
            self._back = asyncio.Event()
        self._back.clear()
        self._lost[index] = asyncio.create_task(self._look(index), name=f"look for {self.members[index].name}")

    async def _look(self, index: int) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    await self.members[index].identify()
                break
            except (ActorGone, TimeoutError):
                await asyncio.sleep(PROBE_S)
        del self._lost[index]
        assert self._back is not None
        self._back.set()

    def _forget_other_loops(self) -> None:
        """A loop that ended took its look-outs with it."""
        loop = asyncio.get_running_loop()
        for index, looking in list(self._lost.items()):
            if looking.get_loop() is not loop or looking.done():
                del self._lost[index]


class OneActor:
    """A `Caller` for one actor, whose loss is told at once: whoever holds it knows what to do."""

    def __init__(self, part: Part, member: Member) -> None:
        self.part = part
        self.member = member

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self.member.call(self.part, method, *arguments)

    async def control(self, method: str, *arguments: Any) -> list[Any]:
        return [await self.member.control(self.part, method, *arguments)]

    def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        return self.member.stream(self.part, method, *arguments)


class Patience:
    """Of one call: so long from a loss on, and anew for one that comes after that, some times."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._ends = -math.inf
        self._left = RENEWALS

    def now(self) -> float:
        """Something was lost: until when it is waited for."""
        lost_at = asyncio.get_running_loop().time()
        if lost_at > self._ends and self._left:
            self._left -= 1
            self._ends = lost_at + self._wait_s
        return self._ends


class PatientActor(OneActor):
    """A `Caller` for one actor that is asked again, also by control calls, when it is back. It may travel."""

    def __init__(self, part: Part, member: Member, wait_s: float = WAIT_S) -> None:
        super().__init__(part, member)
        self._wait_s = wait_s

    def __reduce__(self) -> tuple[Any, ...]:
        return PatientActor, (self.part, self.member, self._wait_s)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Raises ActorGone when it is not there for too long."""
        ask = super().call
        return await self._patiently(lambda: ask(method, *arguments))

    async def control(self, method: str, *arguments: Any) -> list[Any]:
        ask = super().control
        answers: list[Any] = await self._patiently(lambda: ask(method, *arguments))
        return answers

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Asked again only while nothing was handed out."""
        ends = Patience(self._wait_s)
        while True:
            begun = False
            try:
                async with contextlib.aclosing(super().stream(method, *arguments)) as pieces:
                    async for piece in pieces:
                        begun = True
                        yield piece
                return
            except ActorGone as gone:
                if begun:
                    raise
                await self._until_back(gone, ends.now())

    async def _patiently(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        ends = Patience(self._wait_s)
        while True:
            try:
                return await ask()
            except ActorGone as gone:
                await self._until_back(gone, ends.now())

    async def _until_back(self, gone: ActorGone, ends: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < ends:
            await asyncio.sleep(PROBE_S)
            with contextlib.suppress(ActorGone, TimeoutError):
                async with asyncio.timeout_at(ends):
                    await self.member.identify()
                return
        raise gone


class ToDriver:
    """A `Caller` in an actor, for an object that lives in the driver. It travels as the object's id."""

    def __init__(self, port: str) -> None:
        self.port = port

    async def call(self, method: str, *arguments: Any) -> Any:
        return await host.outbox().call(self.port, method, arguments)

    async def control(self, method: str, *arguments: Any) -> list[Any]:
        return [await host.outbox().call(self.port, method, arguments)]

    def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        return host.outbox().stream(self.port, method, arguments)

    def tell(self, method: str, *arguments: Any) -> None:
        """One way; returns at once."""
        host.outbox().tell(self.port, method, arguments)
