"""One actor, as everybody else sees it, in the driver and in other actors.

A `Part` is an object in an actor: what it is and how it is built travels with every proxy, so that an actor that was
restarted is given it again by whoever calls it next. What Ray says about a lost actor becomes `ActorGone`; nothing
further out sees an exception of Ray's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from penstock.cluster.line import ActorGone, Line, answered, line_to
from penstock.cluster.wire import MISSING, pack, read_answer

__all__ = ["ActorGone", "Identity", "Member", "Part"]


class Part(msgspec.Struct, frozen=True):
    """An object that lives in actors."""

    id: str
    luggage: bytes
    """How it is built: see `host.pack_luggage`."""
    heals: bool = True
    """Whether an actor that was restarted is given it again without a word. False: the caller is told ActorGone, and
    has to `install` it."""


class Identity(msgspec.Struct, frozen=True):
    """Who answers under a member's name. A restarted actor is another one."""

    incarnation: str
    pid: int
    node: str
    """Its address."""


class Member:
    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self._line: Line | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Member, (self.name, self.handle)

    @property
    def line(self) -> Line:
        if self._line is None or self._line.loop is not asyncio.get_running_loop():
            self._line = line_to(self.name, self.handle)
        return self._line

    async def call(self, part: Part, method: str, *arguments: Any) -> Any:
        """Raises what the object raises, as itself; ActorGone when the actor is lost. Cancelling cancels it there."""
        packed = pack(arguments)
        answer = await self.line.call(part.id, method, packed)
        if answer == MISSING:
            await self._heal(part)
            answer = await self.line.call(part.id, method, packed)
        return self._read(answer)

    async def control(self, part: Part, method: str, *arguments: Any) -> Any:
        """As `call`, past all calls that wait."""
        packed = pack(arguments)
        answer = await answered(self.name, self.handle.control, part.id, method, packed)
        if answer == MISSING:
            await self._heal(part)
            answer = await answered(self.name, self.handle.control, part.id, method, packed)
        return self._read(answer)

    async def stream(self, part: Part, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """What the object's method yields. Closing it early cancels it there."""
        packed = pack(arguments)
        for healed in (False, True):
            answers = self.line.stream(part.id, method, packed)
            try:
                async for answer in answers:
                    if answer == MISSING and not healed:
                        break
                    yield self._read(answer)
                else:
                    return
            finally:
                await answers.aclose()
            await self._heal(part)

    async def install(self, part: Part) -> dict[str, Any]:
        """Build it there, unless it is there. Returns plain data that its proxy needs. Raises what building raises."""
        answer = await answered(self.name, self.handle.install, part.id, part.luggage)
        facts: dict[str, Any] = read_answer(answer)
        return facts

    async def identify(self) -> Identity:
        """Past all calls that wait."""
        return Identity(*await answered(self.name, self.handle.identify))

    def _read(self, answer: bytes) -> Any:
        if answer == MISSING:
            raise ActorGone(f"actor {self.name} was restarted again")
        return read_answer(answer)

    async def _heal(self, part: Part) -> None:
        if not part.heals:
            raise ActorGone(f"actor {self.name} was restarted and has to be given its part again")
        await self.install(part)
